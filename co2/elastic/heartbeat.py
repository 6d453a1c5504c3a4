"""Heartbeat: the thread that gives a member's signs of life and watches those of the others.

It has a connection to the store of its own, and asks for the signs of all others in one call, so
that neither the number of members nor a slow link makes healthy ones look silent:

    every silent_s/10      a sign of life;  one `multi_get` for the signs of all who are watched
    every 0.1 s            one `multi_get` for what must be known at once: how many are gone, and
                           whether this generation is over

A member is silent once its sign has not changed for `silent_s` (`Sign`). One that has gone is lost
at once, also if it has gone before anybody watched it: who is gone is known of all processes of the
run, not of those alone that are watched.

The machines of a run give signs of life in the same way (co2/elastic/store.py).
"""

import threading
import time
from collections.abc import Callable, Iterable

import torch.distributed as dist

TICK_S = 0.1
"""Between two looks at what must be known at once; longer with hundreds of members."""
TICK_PER_MEMBER_S = 0.0005
"""The store answers a few thousand questions a second."""
_SIGNS = 10
"""Signs of life in `silent_s`."""
_LOOKS = 5
"""Fewest in which a sign must not have changed."""
_START_S = 600.0
"""A process that has given no sign of life yet may still be importing."""
STOP = "stop"
"""A counter: requests to stop."""
_BORN, _GONE = "born", "gone"
"""Lists: processes that have given a sign of life, and that are gone."""


def key(*parts: object) -> str:
    """A name in the store."""
    return "/".join(map(str, parts))


def add_to(store: dist.Store, name: str, *numbers: int) -> None:
    """Add numbers to a list in the store, one after the other."""
    text = "".join(f"{number} " for number in numbers)
    store.append(name, text)  # type: ignore[attr-defined]  # torch's stubs lack it


def listed(value: bytes) -> set[int]:
    """What is in such a list."""
    return set(map(int, value.split()))


def announce_gone(store: dist.Store, *numbers: int) -> None:
    """Tell all members that processes have ended."""
    add_to(store, _GONE, *numbers)
    store.add("departures", 1)


def has_lived(store: dist.Store, number: int) -> bool:
    """Whether a process has given a sign of life, or is known to be gone."""
    names = [name for name in (_BORN, _GONE) if store.check([name])]
    return any(number in listed(store.get(name)) for name in names)


class Sign:
    """Somebody's last sign of life, and for how long it has been the last.

    Between two looks at most a fifth of `silent_s` counts: a look takes as long as the link needs,
    and after this process itself was stopped, the first ones tell nothing.

    Args:
        silent_s: seconds after which whoever gave it counts as silent.
        now: in seconds, as in all methods.
    """

    def __init__(self, silent_s: float, now: float) -> None:
        self.value = b""
        """Empty while there was none."""
        self._most_s, self._looked, self._counted_s = silent_s / _LOOKS, now, 0.0

    def seen(self, value: bytes, now: float) -> None:
        """A look has found this."""
        self._counted_s = self.silence(now) if value == self.value else 0.0
        self.value, self._looked = value, now

    def silence(self, now: float) -> float:
        """Seconds since it was new."""
        return self._counted_s + min(now - self._looked, self._most_s)


class Heartbeat:
    """The thread. Its methods are called by the thread that trains, unless they say otherwise.

    Args:
        store: a connection of the thread's own, because one answers one question at a time.
        me: this process.
        silent_s: see above.
        over: called by the thread once for each generation that has lost a member, with its number
            and whether the others know already.
        failed: called by the thread with the error that has ended it.
        clock: in seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        me: int,
        silent_s: float,
        over: Callable[[int, bool], None],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.me, self.silent_s = store, me, silent_s
        self._over, self._failed, self._clock = over, failed, clock
        self.round_trip_s = 0.0
        """How long the store took to answer last."""
        self._lock = threading.Lock()
        """Of the following three."""
        self._signs: dict[int, Sign] = {}
        self._gone: set[int] = set()
        self._generation: int | None = None
        """Of those that are watched, once they are members; None: nobody's yet, or over."""
        self._departures = self._beats = 0
        self._due = clock()
        for name in ("departures", STOP):
            store.add(name, 0)  # so that it is there
        self._beat()
        add_to(store, _BORN, me)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> "Heartbeat":
        """Begin to beat by itself."""
        self._thread.start()
        return self

    def watch(self, ids: Iterable[int], generation: int | None = None) -> None:
        """Watch these, and nobody else. With a generation they are its members: losing one of them
        ends it."""
        now = self._clock()
        if generation is not None:
            self.store.compare_set(key("broken", generation), "", "0")  # so that it is there
        with self._lock:
            self._signs = {one: self._signs.get(one) or Sign(self.silent_s, now) for one in ids}
            self._generation = generation

    def silence(self, one: int) -> str:
        """Why a watched process counts as lost; empty while it does not. Any thread may call it."""
        with self._lock:
            if one in self._gone:
                return "gone"
            sign = self._signs.get(one)
            if sign is None:  # not watched any more
                return ""
            silent = sign.silence(self._clock())
        lost = silent > (self.silent_s if sign.value else _START_S)
        return f"silent for {silent:.0f} s" if lost else ""

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def turn(self) -> float:
        """One turn of the thread. Returns the seconds until the next."""
        if self._clock() >= self._due:
            self._due = self._clock() + self.silent_s / _SIGNS
            self._beat()
            self._look_at_signs()
        self._look_around()
        return max(TICK_S, TICK_PER_MEMBER_S * len(self._signs))

    def _run(self) -> None:
        try:
            while not self._closed.wait(self.turn()):
                pass
        except Exception as error:
            self._failed(error)

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(key("alive", self.me), str(self._beats))

    def _look_at_signs(self) -> None:
        with self._lock:
            signs = self._signs
            known = [one for one, sign in signs.items() if sign.value]
        if len(known) < len(signs):
            born = listed(self.store.get(_BORN))
            known = [one for one in signs if one in born]
        values = self.store.multi_get([key("alive", one) for one in known]) if known else []
        found, now = dict(zip(known, values, strict=True)), self._clock()
        with self._lock:
            for one, sign in signs.items():  # also those that are not watched any more
                sign.seen(found.get(one, b""), now)

    def _look_around(self) -> None:
        with self._lock:
            generation = self._generation
        names = ["departures", *([] if generation is None else [key("broken", generation)])]
        began = self._clock()
        departures, *broken = map(int, self.store.multi_get(names))
        self.round_trip_s = self._clock() - began
        if departures != self._departures:
            gone = listed(self.store.get(_GONE))
            with self._lock:
                self._departures, self._gone = departures, gone
        if generation is None:
            return
        told = any(broken)
        with self._lock:
            members = list(self._signs) if self._generation == generation else []
        if told or any(self.silence(one) for one in members):
            with self._lock:
                if self._generation == generation:
                    self._generation = None
            self._over(generation, told)
