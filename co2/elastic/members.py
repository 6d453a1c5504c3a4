"""Members: which replicas train together now, agreed upon through a store that outlives them all.

Replicas come and go, so the process groups of a run are made anew for every *generation* of its
members. What PyTorch offers for that (`init_process_group(enable_reconfigure=True)`) is younger
than the versions that we support and renews a group in place; making all groups anew works for
every group that a method has, and is the code that a run starts with.

Two things have to be agreed, and neither can be had from the groups that may just have failed:

**Whether a collective counts.** A ring may end well on one replica and fail on another. Every
collective therefore has a *ticket*, by which each replica tells the store when its own part has
ended well. When all have, the last one to say so writes the decision `ok`; a replica whose part has
failed tries to write `lost`. The store keeps what was written first, and everybody obeys that. A
mean that is `lost` is taken again by those who are left, from what they had sent. So all survivors
are at the same place of the same step, and none repeats one. What the store holds of a ticket is
deleted once all have read it.

**Who is left.** Every member gives signs of life (co2/elastic/heartbeat.py). A member is lost once
it has been silent for `silent_s` seconds, or once what started it says that it is gone. The next
generation has the members that report for it; newcomers are let in only where a decision says so,
because that is where all replicas are at the end of a step. Of several workers that share a replica
each is a member; they are lost, and come, together.

A decision also carries what each replica has told of its pace, so that all draw the same conclusion
from the same figures (co2/elastic/quorum.py).

Two threads talk to the store beside the one that trains: the heartbeat, and the one that reports
how collectives have ended (`Reports`). They decide nothing about training: a replica
acts on a decision when it comes to the place where it needs the collective, which is a function of
the step alone.
"""

import gc
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from traceback import extract_tb

import torch
import torch.distributed as dist

from co2.comm.waiting import until_cut, use, well_on_all
from co2.elastic.heartbeat import STOP, TICK_S, Heartbeat, add_to, key, listed
from co2.elastic.sockets import Sockets, abort, expect_losses, make_group, nccl_backends
from co2.errors import first_line

Ticket = tuple[int, int]
"""Of a collective: its generation, and its number in it."""
OK, LOST, JOIN, PACES = "ok", "lost", "join", "paces="

FORMING = timedelta(seconds=20)
"""To connect the members of a generation."""
STORE_ANSWERS_S = 30.0
"""The store's machine is gone once it has not confirmed for so long that anything has arrived."""
_ATTEMPTS = 5
"""To connect the same members."""
_AGES = timedelta(days=1)
"""For collectives, which end with an error when the connections are cut."""
_POLL_S, _POLL_PER_MEMBER_S = 0.005, 0.0005
"""Between two looks at who is there. The store answers a few thousand questions a second."""
_ASK_S, _ASK_ROUND_TRIPS = 0.2, 4
"""How long the store is asked at a time for a decision: a slow link needs longer for any answer."""
_ASKED = "asked"
"""A list: processes that have ever asked to join, in this order."""


@dataclass(frozen=True)
class Roster:
    """Who is in a generation, as its first complete report has it."""

    ids: tuple[int, ...]
    """In the order of their ranks."""
    lost: dict[int, str]
    """Those of the generation before who are not, and why."""
    admitted: int
    """How many of those who ever asked to join have been let in, or given up."""

    def text(self) -> str:
        """For the store."""
        return json.dumps([self.ids, list(self.lost.items()), self.admitted])

    @classmethod
    def of(cls, text: bytes) -> "Roster":
        """The reverse of `text`."""
        ids, lost, admitted = json.loads(text)
        return cls(tuple(ids), dict(lost), admitted)


class MemberLost(RuntimeError):
    """A collective did not end well, because a member is lost. The others have to go on."""


class Expelled(Exception):
    """The others have gone on without this process, which was silent for too long."""


class StoreLost(Exception):
    """The store cannot be reached, so that nothing can be agreed upon."""


class ThreadFailed(Exception):
    """A thread that this member needs has failed."""


class Unreachable(Exception):
    """Members who all give signs of life cannot connect with each other."""


class Reports:
    """The thread that talks to the store while the one that trains goes on. It does what is urgent
    first, and of that what came first.

    Args:
        failed: called by the thread with the error that has ended it.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed, self._numbers = failed, itertools.count()
        self.waiting = queue.PriorityQueue[tuple[int, int, Callable[[], object] | None]]()
        """What is not begun: how little urgent it is, its number, and what to do."""
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def add(self, act: Callable[[], object], urgent: bool = True) -> None:
        """Have something done. Any thread may call it."""
        self.waiting.put((0 if urgent else 1, next(self._numbers), act))

    def close(self) -> None:
        """End the thread, when all is done."""
        self.waiting.put((2, next(self._numbers), None))
        self._thread.join()

    def _run(self) -> None:
        try:
            while (act := self.waiting.get()[-1]) is not None:
                act()
        except Exception as error:
            self._failed(error)


class Members:
    """The members of a run as this process knows them. Its methods are called by the thread that
    trains, unless they say otherwise.

    Args:
        address: host and port of the store.
        me: a number that no other process of the run has, or had.
        silent_s: seconds without a sign of life after which a member counts as lost.
        backend: of the process groups, as `init_process_group` takes it. NCCL's are those of the
            current GPU.
        replica_size: processes of a replica, which have successive numbers. They wait for each
            other here, and make their own world PyTorch's default group.
    """

    def __init__(
        self,
        address: tuple[str, int],
        me: int,
        silent_s: float,
        backend: str = "gloo",
        replica_size: int = 1,
    ) -> None:
        # A collection looks no more at what there is by now. It would take a second or more amid
        # every recovery (`_break_up`), and make copies of what a worker shares with its parent.
        gc.freeze()
        self.me, self.replica_size = me, replica_size
        self._address, self._backend = address, backend
        if "nccl" in backend:
            expect_losses()
        self.store, self._reporting, beating = (connected(address) for _ in range(3))
        self.ids: tuple[int, ...] = ()
        """Members of this generation, in the order of their ranks."""
        self.generation = -1
        self.lost: dict[int, str] = {}
        """Whom the last change of members has lost, and why."""
        self.joined: tuple[int, ...] = ()
        """Who came in with the last change of members."""
        self.stop_due = False
        """Whether all know that somebody has asked all to stop."""
        self.change_due = False
        """Whether all members have agreed to let newcomers in after this step."""
        self.paces: tuple[float, ...] = ()
        """Seconds that each member needs for a step, in the order of ranks, as the newest decision
        has them; empty while none has."""
        self.steps: Mapping[int, int] = {}
        """How many steps each member makes in the round under way; empty where all make as many."""
        self._pace: float | None = None
        self._pace_sent: float | None = None
        self._admitted = 0
        self._next, self._unsettled, self._low = 0, set[int](), 1
        """Last ticket of this generation; open tickets; lowest open ticket when the last one was
        opened."""
        self._read_by_all: dict[int, range] = {}
        """Ticket → earlier tickets whose keys may be deleted once it is decided."""
        self._before: list[str] = []
        """Keys of the store to delete once a first ticket of this generation counts."""
        self.broken = False
        """Whether this generation has ended for all, because one of them is lost."""
        self.sockets = self._meeting = Sockets()
        """What carries collectives, and what the members of a generation find each other by."""
        self._groups: list[dist.ProcessGroup] = []
        """Those of this generation; the first is of all its members."""
        use(self.sockets)
        self._turning = threading.Lock()
        """Held while this generation becomes the next."""
        self._error: Exception | None = None
        """What has ended another thread."""
        self.store.compare_set(_ASKED, "", " ")  # so that it is there
        self._reports = Reports(self.thread_failed)
        self._heart = Heartbeat(beating, me, silent_s, self._over, self.thread_failed).start()
        replica, rank = divmod(me, replica_size)
        own = dist.PrefixStore(key("replica", replica), self.another_store())
        dist.init_process_group(backend, store=own, rank=rank, world_size=replica_size)

    # Tickets.

    def open(self) -> Ticket:
        """Open the ticket of a collective that starts now. All members open theirs in the same
        order."""
        self._next += 1
        self._unsettled.add(self._next)
        low = min(self._unsettled)
        # All members open and settle in the same order, so this holds for all who open this one.
        self._read_by_all[self._next] = range(self._low, low)
        self._low = low
        return self.generation, self._next

    def ended(self, ticket: Ticket, well: bool) -> None:
        """This member's part of a collective has ended. Any thread may call it."""
        self._reports.add(partial(self._report, ticket, well))

    def settle(self, ticket: Ticket) -> None:
        """Wait until the group commits or aborts this collective; its own part has succeeded.

        Raises:
            MemberLost: it does not count.
        """
        while not self.broken:
            seconds = max(_ASK_S, _ASK_ROUND_TRIPS * self._heart.round_trip_s)
            try:
                self.store.wait([key("decided", *ticket)], timedelta(seconds=seconds))
                break
            except dist.DistStoreError:
                self._check()
        words = self._decide(self.store, ticket, LOST).split()
        if LOST in words:
            raise MemberLost(f"a collective of generation {ticket[0]} was given up")
        self._unsettled.discard(ticket[1])
        if self._before:  # all are in this generation
            self._discard(self._before if self.ids[0] == self.me else ())
            self._before = []
        self.stop_due = self.stop_due or STOP in words
        self.change_due = self.change_due or JOIN in words
        for word in words:
            if word.startswith(PACES):
                self.paces = tuple(map(float, word.removeprefix(PACES).split(",")))

    def failed(self, ticket: Ticket, error: Exception) -> None:
        """This member's part has failed. Raises `MemberLost`."""
        self._decide(self.store, ticket, LOST)
        self.give_up(self.store, ticket[0])
        raise MemberLost(first_line(error)) from error

    def counts(self, ticket: Ticket) -> bool:
        """Whether a collective counts, now that members change. The same for all of them."""
        return LOST not in self._decide(self.store, ticket, LOST).split()

    def agree(self) -> None:
        """Wait until all members have come here. Raises `MemberLost`."""
        ticket = self.open()
        self._commit_vote(self.store, ticket)
        self.settle(ticket)

    def ask_to_stop(self) -> None:
        """Have all find in the decisions to come that they should stop."""
        self.store.add(STOP, 1)

    def _report(self, ticket: Ticket, well: bool) -> None:
        """In the thread for it."""
        if well:
            self._commit_vote(self._reporting, ticket)
        else:
            self.give_up(self._reporting, ticket[0])

    def _commit_vote(self, store: dist.Store, ticket: Ticket) -> None:
        """Report success; the last reporter commits."""
        ids = self.ids
        if ticket[0] != self.generation:  # it has ended since; `ids` are the next one's
            return
        read_by_all = self._read_by_all.pop(ticket[1], range(0))
        pace = self._pace
        if pace is not None and pace != self._pace_sent:
            store.set(key("pace", self.me), repr(pace))
            self._pace_sent = pace
        if store.add(key("done", *ticket), 1) == len(ids):
            stop, asked = store.multi_get([STOP, _ASKED])
            words = [OK]
            stopping = int(stop) > 0
            words += [STOP] if stopping else []
            words += [JOIN] if len(asked.split()) > self._admitted and not stopping else []
            told = [key("pace", one) for one in ids]
            if pace is not None and store.check(told):
                words += [PACES + ",".join(found.decode() for found in store.multi_get(told))]
            self._decide(store, ticket, " ".join(words))
            self._discard(_of_tickets(ticket[0], read_by_all))

    def _discard(self, names: Iterable[str]) -> None:
        """Have these deleted from the store."""
        for name in names:
            self._reports.add(partial(self._reporting.delete_key, name), urgent=False)

    # Steps.

    def measured(self, seconds: float) -> None:
        """Report the seconds that this member needs for a step, with its next votes."""
        self._pace = seconds

    def share_out(self, steps: Mapping[int, int]) -> None:
        """Set how many steps each member makes in the current round, or in the one that begins. The
        same on all members; empty: all make as many."""
        self.steps = steps

    def weights(self) -> Mapping[int, int]:
        """Weight of each member in a mean: its steps of the round, or one where all make as
        many."""
        return {one: self.steps.get(one, 1) for one in self.ids}

    # Losses.

    def give_up(self, store: dist.Store, generation: int) -> None:
        """End a generation, for all members. Any thread may call it."""
        store.set(key("broken", generation), "1")
        self.cut(generation)

    def cut(self, generation: int) -> None:
        """End all collectives of a generation, if it is still this one, with an error. Any thread
        may call it."""
        with self._turning:
            if generation == self.generation:
                self._end()

    def _over(self, generation: int, told: bool) -> None:
        """In the heartbeat's thread: one of the members is lost."""
        if told:
            self.cut(generation)
        else:
            self.give_up(self._heart.store, generation)

    def thread_failed(self, error: Exception) -> None:
        """Called by another thread that an error has ended: the one that trains raises `StoreLost`
        or `ThreadFailed` when it waits for the others."""
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            failed: Exception = StoreLost("the store of the run's members is gone")
        else:
            name, at = threading.current_thread().name, extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {first_line(error)} ({at.filename}:{at.lineno})"
            failed = ThreadFailed(f"its thread {name} has failed: {text}")
        failed.__cause__ = error
        # First: a generation that begins now is not cut, and looks for an error.
        self._error = failed
        self.cut(self.generation)

    def _check(self) -> None:
        """Raise the error that `thread_failed` was given."""
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        """Abort all collectives of this generation. The caller holds `_turning`."""
        ended, self.broken = self.broken, True
        self.sockets.cut()  # first: what NCCL ends from here on does not count
        self._meeting.cut()
        if not ended:
            abort(nccl_backends(self._groups))

    def _decide(self, store: dist.Store, ticket: Ticket, words: str) -> str:
        """Write a decision unless there is one. Returns what is decided."""
        found: bytes = store.compare_set(key("decided", *ticket), "", words)
        return found.decode()

    # Generations.

    def first(self, ids: Iterable[int]) -> None:
        """Form the first generation, of the processes that a run starts with."""
        self._form(tuple(ids), admit=False)

    def join(self) -> None:
        """Wait to be let in by the members of a run that goes on, and be one of them. All processes
        of a replica come in together."""
        tried = -1
        while True:
            if self.me % self.replica_size == 0:
                add_to(self.store, _ASKED, *range(self.me, self.me + self.replica_size))
            while (invited := self._invitation()) <= tried:
                self._check()
                time.sleep(TICK_S)
            # Members may invite again while a replica's workers look, one before and one after.
            newest = torch.tensor(invited)
            dist.all_reduce(newest, dist.ReduceOp.MAX)
            self._break_up()
            self.generation = tried = int(newest)
            self._report_for_generation()
            entered = False
            try:
                self._enter(self._roster(()))
                entered = True
            except Expelled:  # the others were in time without this one
                pass
            except RuntimeError:  # somebody was lost just then
                self.give_up(self.store, self.generation)
            if well_on_all(entered):
                self.joined = (self.me,)
                return

    def renew(self, admit: bool) -> None:
        """Form the next generation, of those members that are left.

        Args:
            admit: let in those who wait, too.
        Raises:
            Expelled: the others have gone on without this process.
            Unreachable: there are others, but no connections.
        """
        self._form(self.ids, admit)

    def waiting(self) -> list[int]:
        """Processes that have asked to join, and have not been let in."""
        return self._asked()[self._admitted :]

    def formed(self) -> None:
        """Call it once, when all process groups of this generation have been made. Collective.
        Raises `RuntimeError` if a member is lost meanwhile."""
        if len(self.ids) > 1:
            ports: list[list[int]] = [[] for _ in self.ids]
            own = self.sockets.listening()
            until_cut(lambda: dist.all_gather_object(ports, own, self._groups[0]))
            self.sockets.keep({port for one in ports for port in one})
        on_gpus = nccl_backends(self._groups)
        for backend in on_gpus:  # NCCL would connect in the first collective of each
            device = torch.device("cuda", torch.cuda.current_device())
            connect = partial(backend.eager_connect_single_device, device)
            with self.sockets.opening():
                until_cut(connect)
        on_hosts = [group._get_backend(torch.device("cpu")) for group in self._groups]
        for backend in (*on_hosts, *on_gpus):
            backend._set_default_timeout(_AGES)

    def present(self) -> list[int]:
        """Those of this generation that are not known to be lost."""
        return [one for one in self.ids if not self._heart.silence(one)]

    def another_store(self) -> dist.TCPStore:
        """A connection to the store for another thread."""
        return connected(self._address)

    def leave(self) -> None:
        """Leave a run that has succeeded on all members."""
        self.close()
        self._break_up()
        use(None)
        dist.destroy_process_group()
        gc.collect()  # joins the threads of groups that only cycles hold

    def close(self) -> None:
        """End the threads: no more signs of life, and nothing is told any more."""
        self._heart.close()
        self._reports.close()

    def _form(self, old: tuple[int, ...], admit: bool) -> None:
        lost: dict[int, str] = {}
        newcomers: tuple[int, ...] = ()
        tried: list[tuple[int, ...]] = []
        while True:
            self._break_up()
            if admit:  # one whom the attempt before has let in has to ask again
                newcomers = tuple(dict.fromkeys(self._invite()))
            candidates = (*old, *newcomers)
            self._heart.watch(candidates)
            self._report_for_generation()
            roster = self._roster(candidates)
            lost = {**roster.lost, **lost}
            for one, why in roster.lost.items():
                self.store.set(key(LOST, one), why)
            try:
                self._enter(roster)
            except Expelled:
                raise
            except RuntimeError as error:  # one of them was lost since it reported
                self.give_up(self.store, self.generation)
                tried.append(roster.ids)
                if tried.count(roster.ids) == _ATTEMPTS:
                    text = first_line(error)
                    raise Unreachable(f"members cannot connect with each other ({text})") from error
                continue
            self.lost = {one: why for one, why in lost.items() if one in old}
            # By the roster: not all members may have seen the same newcomers wait.
            self.joined = tuple(sorted(one for one in self.ids if one not in old))
            return

    def _asked(self) -> list[int]:
        return list(map(int, self.store.get(_ASKED).split()))

    def _invitation(self) -> int:
        """The newest generation to which this process has been invited; -1: none."""
        own = [f"invited/{at}" for at, one in enumerate(self._asked()) if one == self.me]
        return max((int(self.store.get(one)) for one in own if self.store.check([one])), default=-1)

    def _invite(self) -> list[int]:
        """Those who wait to be let in, told when to report."""
        found = self.waiting()
        for number in range(self._admitted, self._admitted + len(found)):
            self.store.set(f"invited/{number}", str(self.generation))
        self._admitted += len(found)
        return found

    def _report_for_generation(self) -> None:
        self._check()
        add_to(self.store, key("here", self.generation), self.me)

    def _roster(self, candidates: tuple[int, ...]) -> Roster:
        """Wait until it is known who is in this generation. Those who join have no candidates, and
        leave it to the others to say so."""
        name = key("members", self.generation)
        while not self.store.check([name]):
            self._check()
            if candidates:
                here = listed(self.store.get(key("here", self.generation)))
                lost = self._lost(one for one in candidates if one not in here)
                ids = tuple(sorted(one for one in candidates if one not in lost))
                if here.issuperset(ids):
                    self.store.compare_set(name, "", Roster(ids, lost, self._admitted).text())
                    continue
            time.sleep(max(_POLL_S, _POLL_PER_MEMBER_S * len(candidates)))
        return Roster.of(self.store.get(name))

    def _lost(self, away: Iterable[int]) -> dict[int, str]:
        """Who is lost, and why: those of `away` that have gone or are silent, each with its whole
        replica."""
        silent = {one: why for one in away if (why := self._heart.silence(one))}
        lost = {}
        for one, why in silent.items():
            first = one - one % self.replica_size
            for sibling in range(first, first + self.replica_size):
                lost[sibling] = f"worker {one} of its replica is {why}"
        return lost | silent

    def _enter(self, roster: Roster) -> None:
        """Connect with the members of a roster. Raises `Expelled`, or `RuntimeError` if one of them
        is not there."""
        if self.me not in roster.ids:
            why = roster.lost.get(self.me, "silent for too long")
            raise Expelled(f"{why}; the others have gone on without it")
        self._admitted = roster.admitted
        # A connection of the generation's own: when it is cut, nobody waits any more for the
        # address of one that is lost.
        meeting = Sockets()
        with meeting.opening():
            self._addresses = dist.TCPStore(*self._address, is_master=False)
        meeting.keep({self._address[1]})
        with self._turning:
            self._meeting, self.sockets = meeting, Sockets()
        use(self.sockets)
        self.ids = roster.ids
        self._heart.watch(roster.ids, self.generation)
        self._check()
        use(self.sockets, self.new_group(range(len(self.ids)), None))

    def new_group(self, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        """Make a process group of this generation. Collective of its members, of which this is
        one; all members make theirs in the same order."""
        name = key("groups", self.generation, len(self._groups), ranks[0])
        rank, backend = ranks.index(self.ids.index(self.me)), backend or self._backend
        with self.sockets.opening():
            group = make_group(name, self._addresses, rank, len(ranks), backend, FORMING)
        self._groups.append(group)
        return group

    def _break_up(self) -> None:
        """Leave the groups of this generation, which is over."""
        with self._turning:
            self._end()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        gc.collect()  # joins the threads of groups that nobody holds any more
        here = key("here", self.generation)
        self._before += [*_of_tickets(self.generation, range(self._low, self._next + 1)), here]
        with self._turning:
            self.generation += 1
            self.ids, self.broken = (), False
            self.sockets = Sockets()
        use(self.sockets)
        self.stop_due = self.change_due = False
        self.paces = ()
        self._next, self._low = 0, 1
        self._unsettled.clear()
        self._read_by_all.clear()


def _of_tickets(generation: int, numbers: Iterable[int]) -> list[str]:
    """What the store holds of tickets."""
    return [key(name, generation, number) for number in numbers for name in ("done", "decided")]


def connected(address: tuple[str, int]) -> dist.TCPStore:
    """A connection to the store, which ends with an error once the store's machine has not
    confirmed for `STORE_ANSWERS_S` that anything has arrived."""
    sockets = Sockets()
    with sockets.opening():
        store = dist.TCPStore(*address, is_master=False)
    sockets.keep({address[1]})
    sockets.give_up_after(STORE_ANSWERS_S)
    return store
