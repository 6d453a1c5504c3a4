"""Signs of life over a slow link: healthy members stay, and one that stands still is found."""

import heapq
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from co2.elastic.heartbeat import Heartbeat, Sign, announce_gone

SILENT_S = 10.0
WATCHERS = 8
"""Members that watch all others; the rest watch these, which takes as many calls."""


class DelayedStore:
    """A store that answers after a round trip, on a clock that nothing else moves. What is written
    is there for all who read later, by this clock."""

    def __init__(self, round_trip_s: float) -> None:
        self.half_s, self.now = round_trip_s / 2, 0.0
        self.calls = 0
        self._written: dict[str, list[tuple[float, bytes]]] = defaultdict(list)

    def set(self, name: str, value: str) -> None:
        self._answer(lambda: self._write(name, value.encode()))

    def get(self, name: str) -> bytes:
        return self._answer(lambda: self._read(name))

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        return self._answer(lambda: [self._read(name) for name in names])

    def add(self, name: str, number: int) -> int:
        def added() -> int:
            total = int(self._read(name, b"0")) + number
            self._write(name, str(total).encode())
            return total

        return self._answer(added)

    def append(self, name: str, text: str) -> None:
        self._answer(lambda: self._write(name, self._read(name, b"") + text.encode()))

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        def compared() -> bytes:
            if self._read(name, b"") == expected.encode():
                self._write(name, value.encode())
            return self._read(name, b"")

        return self._answer(compared)

    def _answer(self, act):  # type: ignore[no-untyped-def]
        self.calls += 1
        self.now += self.half_s
        found = act()
        self.now += self.half_s
        return found

    def _write(self, name: str, value: bytes) -> None:
        self._written[name] = [*self._written[name][-20:], (self.now, value)]

    def _read(self, name: str, otherwise: bytes | None = None) -> bytes:
        """What was written last by now: turns of members overlap in time."""
        for at, value in reversed(self._written[name]):
            if at <= self.now:
                return value
        assert otherwise is not None, f"nobody would ever answer what {name} is"
        return otherwise


def fail(error: Exception) -> None:
    raise error


class Cluster:
    """Members that all watch each other, without threads: one turn after the other."""

    def __init__(self, number: int, round_trip_s: float) -> None:
        self.store = DelayedStore(round_trip_s)
        self.over: dict[int, float] = {}
        """By member: when it has found that the generation is over."""
        self.members = [self._member(one) for one in range(number)]
        everybody = range(number)
        for one, member in enumerate(self.members):
            member.watch(everybody if one < WATCHERS else {*range(WATCHERS), one}, generation=0)
        self.began = self.store.now
        self.due = [(self.began, one) for one in everybody]

    def _member(self, one: int) -> Heartbeat:
        def over(generation: int, told: bool) -> None:
            self.over[one] = self.store.now - self.began

        store: dist.Store = self.store  # type: ignore[assignment]
        return Heartbeat(store, one, SILENT_S, over, fail, clock=lambda: self.store.now)

    def run(self, until_s: float, hanging: frozenset[int] = frozenset()) -> None:
        """Go on until this time. Those that hang do nothing."""
        heapq.heapify(self.due)
        while self.due[0][0] < self.began + until_s:
            at, one = heapq.heappop(self.due)
            if one in hanging:
                heapq.heappush(self.due, (at + until_s, one))
                continue
            self.store.now = at
            pause_s = self.members[one].turn()
            heapq.heappush(self.due, (self.store.now + pause_s, one))

    def suspend(self, seconds: float) -> None:
        """Nobody does anything for so long."""
        self.due = [(at + seconds, one) for at, one in self.due]


@pytest.mark.parametrize("round_trip_s", [0.005, 0.05, 0.2])
@pytest.mark.parametrize("number", [8, 64, 512])
def test_healthy_members_stay_and_one_that_hangs_is_found(number: int, round_trip_s: float) -> None:
    """By all that watch it, once it has been silent for `silent_s`, and not much later."""
    cluster = Cluster(number, round_trip_s)
    cluster.run(2.5 * SILENT_S)
    assert not cluster.over
    hung_at, victim = 2.5 * SILENT_S, number - 1
    cluster.run(4.5 * SILENT_S, hanging=frozenset({victim}))
    found = [cluster.over[one] - hung_at for one in range(min(WATCHERS, number - 1))]
    # Since its last sign of life, which may be a tenth of it old; a look takes some round trips.
    assert min(found) > 0.8 * SILENT_S and max(found) < 1.3 * SILENT_S + 5 * round_trip_s


def test_after_all_were_suspended_nobody_is_lost() -> None:
    """As when a laptop's lid is closed, or a machine with all members is stopped."""
    cluster = Cluster(8, 0.005)
    cluster.run(SILENT_S)
    cluster.suspend(10 * SILENT_S)
    cluster.run(15 * SILENT_S)
    assert not cluster.over


def test_time_without_looks_is_no_silence() -> None:
    """Whoever was stopped itself, or looks rarely, needs several looks to call another silent."""
    sign = Sign(SILENT_S, 0.0)
    sign.seen(b"1", 1.0)
    for look in range(1, 6):
        sign.seen(b"1", 100.0 * look)
        assert sign.silence(100.0 * look) == SILENT_S / 5 * look
    assert sign.silence(501.0) > SILENT_S
    sign.seen(b"2", 502.0)
    assert sign.silence(503.0) == 1.0


def test_a_look_takes_as_many_calls_for_one_as_for_many() -> None:
    calls = []
    for number in (2, 64):
        cluster = Cluster(number, 0.005)
        cluster.run(2.0)
        before = cluster.store.calls
        cluster.store.now += SILENT_S
        cluster.members[0].turn()
        calls.append(cluster.store.calls - before)
    assert calls[0] == calls[1] <= 4


def test_who_is_not_watched_any_more_is_not_silent() -> None:
    """The members may change while the thread looks at one after the other."""
    assert not Cluster(2, 0.005).members[0].silence(7)


def test_who_has_gone_before_anybody_watched_is_gone() -> None:
    """A process that was killed as it asked to join."""
    cluster = Cluster(2, 0.005)
    store: dist.Store = cluster.store  # type: ignore[assignment]
    announce_gone(store, 7)
    watcher = cluster.members[0]
    watcher.turn()
    watcher.watch([0, 1, 7])
    assert watcher.silence(7) == "gone" and not watcher.silence(1)
