"""Replicas: training goes on while replicas are lost and others come.

co2/elastic/members.py agrees on who takes part. Here the mesh and the process groups follow: all
that was made of the mesh is made anew in the same order, and means that were under way and do not
count are taken again. A loss shows where the replicas wait for each other: in the `wait` of a mean
(`RecoveringMean`) or in `together`. Newcomers come at the end of a step (`renew`). Each gets its
state from one of the others, which trains on meanwhile (`send_state`).
"""

import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.mesh import Mesh
from co2.comm.waiting import thread_ended, until_cut
from co2.elastic.members import Expelled, MemberLost, Members, Ticket

T = TypeVar("T")
Changed = Callable[[Mapping[int, str], int, float], None]
"""Who is lost and why; how many members there were before; when the change began, as
`time.perf_counter` has it."""
_FAILURES = 5
_TAG = 1
"""Of the messages with a newcomer's state."""


class Replicas:
    """The replicas of an elastic run.

    Args:
        members: who takes part; of a generation that has been formed.
        device: where this one trains.
    """

    def __init__(self, members: Members, device: torch.device) -> None:
        self.members, self._device = members, device
        self._regroups: list[Callable[[Mesh], None]] = []
        self._means: list[RecoveringMean] = []
        self._changed: Changed = lambda lost, before, began: None
        self._given: Callable[[], object] = lambda: None
        """Waits until newcomers have their state, or their group has ended."""
        self._failures = 0
        """Errors of what all do together, one after the other."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of this generation."""
        ids, size = self.members.ids, self.members.replica_size
        replica, rank = divmod(ids.index(self.members.me), size)
        return Mesh(replica, len(ids) // size, self._device, rank, size, elastic=self)

    @property
    def newcomer(self) -> bool:
        return self.members.me in self.members.joined

    @property
    def generation(self) -> int:
        return self.members.generation

    def new_group(self, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        return self.members.new_group(ranks, backend)

    def on_change(self, regroup: Callable[[Mesh], None]) -> None:
        self._regroups.append(regroup)

    def new_mean(self, *arguments: Any, **more: Any) -> "RecoveringMean":
        """See co2/comm/background_mean.py."""
        mean = RecoveringMean(self, *arguments, **more)
        self._means.append(mean)
        self.on_change(mean.regroup)
        return mean

    def begin(self, changed: Changed) -> None:
        """All process groups have been made. Raises `RuntimeError` if a member is lost meanwhile.

        Args:
            changed: called after every change of the members, when there are groups again and
                before anything is sent. Collective.
        """
        self._changed = changed
        self.members.formed()

    def renew(self, admit: bool = False) -> None:
        """Go on with the members that are left, and with newcomers if `admit`. Collective."""
        began, before = time.perf_counter(), len(self.members.ids)
        lost: dict[int, str] = {}
        if admit:
            self._given()
        while True:
            self.members.renew(admit)
            lost |= self.members.lost
            try:
                mesh = self.mesh
                for regroup in self._regroups:
                    regroup(mesh)
                self.members.formed()
                self.members.agree()  # nobody leaves while another one still connects
                self._changed(lost, before, began)
                lost, before = {}, len(self.members.ids)
                self._relaunch()
                return
            except MemberLost:
                continue
            except RuntimeError as error:
                self.members.give_up(self.members.store, self.members.generation)
                self._fruitless(error)

    def together(self, act: Callable[[], T]) -> T:
        """Run something that all workers enter together, and repeat it after losses until all that
        are left have succeeded. It must be repeatable."""
        while True:
            try:
                return self._agreed(act)
            except MemberLost:
                self.renew()

    def give(self, state: Any, whole: Callable[[], object], group: dist.ProcessGroup) -> None:
        """Begin to send newcomers with this worker's place in their replicas a copy of its state.
        See `send_state`."""
        members = self.members
        ids, size = members.ids, members.replica_size
        ranks = [ids.index(one) for one in members.joined if (one - members.me) % size == 0]
        self._given()
        self._given = send_state(state, whole, ranks, group, members)

    def receive_state(
        self,
        prepare: Callable[[], object],
        load: Callable[[Any], T],
        group: dist.ProcessGroup | None,
    ) -> T:
        """As a newcomer, go on from the state that the first replica gives. Returns what `load`
        does. `Any`: see `send_state`.

        Args:
            prepare: what all do in `changed`. Collective.
            load: takes the state.
        Raises:
            Expelled: one of the others is lost meanwhile. They go on without this process, which
                knows too little.
        """
        try:
            self.members.agree()
            prepare()
            assert group is not None, "there are two at least"
            loaded = load(receive_state(group, self.members.me % self.members.replica_size))
            self._relaunch()
        except RuntimeError as error:
            raise Expelled("one of the others was lost as it joined") from error
        return loaded

    def close(self) -> None:
        """Wait until newcomers have their state, or their group has ended."""
        self._given()

    def _relaunch(self) -> None:
        """Send again the pending means that do not count."""
        for mean in self._means:
            mean.relaunch()

    def _agreed(self, act: Callable[[], T]) -> T:
        """Run it, and wait until all have succeeded. Raises `MemberLost`."""
        members = self.members
        try:
            done = act()
        except MemberLost:
            raise
        except RuntimeError as error:
            self._fruitless(error)
            members.failed(members.open(), error)
        members.agree()
        self._failures = 0
        return done

    def _fruitless(self, error: RuntimeError) -> None:
        """Count a failure, and raise an error that keeps coming back: no connection was lost."""
        self._failures += 1
        if self._failures >= _FAILURES:
            raise error


class RecoveringMean(BackgroundMean):
    """A mean that counts, whoever is lost meanwhile. See `BackgroundMean`. It holds one vector
    more: what was sent last, so that those who are left can take the mean again.

    All find out about a loss at the same mean, because the members decide about one after the other
    in the same order. Where replicas make unequal numbers of steps in a round, they weigh as much
    as they have made.

    Args:
        replicas: whose mean it is. They renew their members in `wait`, and call `regroup` and
            `relaunch` of every mean.
    """

    def __init__(self, replicas: "Replicas", *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._replicas, self._members = replicas, replicas.members
        self._sent = torch.empty_like(self.buffer)
        self._weights: Mapping[int, int] = {}
        """Weight of each member in the pending mean."""
        self._ticket: Ticket | None = None
        """Of the pending collective; None where nothing was sent, or it is known to count."""
        self._again = False
        """Whether the pending mean was given up and waits for `relaunch`."""

    def start(self, vector: Tensor | None = None) -> None:
        self._depart()
        self.is_equal = True
        if vector is not None:
            self.buffer.copy_(vector)
        self._sent.copy_(self.buffer)
        self._weights = self._members.weights()
        self._launch()

    def mark_arrived(self) -> None:
        super().mark_arrived()
        self._ticket = None

    def _launch(self) -> None:
        """Send the buffer, scaled so that a plain average equals the weighted one."""
        members = self._members
        together = sum(self._weights.get(one, 0) for one in members.ids)
        own = self._weights.get(members.me, 0)
        if own * len(members.ids) != together:
            self.buffer.mul_(own * len(members.ids) / together)
        ticket = self._ticket = members.open()
        if self._travels:
            self._runner.launch(self._buckets, self.group, partial(members.ended, ticket))
        else:
            members.ended(ticket, True)

    def _arrive(self) -> None:
        """Wait for the collective and the members' decision, and recover from losses. All of it is
        exposed."""
        self._runner.exposed.begin()
        while True:
            try:
                self.peek()
                break
            except MemberLost:
                self._replicas.renew()
        self._runner.exposed.end()

    def peek(self) -> None:
        """See `BackgroundMean`. Raises `MemberLost` where the mean does not count; it stays in
        flight."""
        if self._again:
            return
        if self._ticket is None:
            super().peek()
            return
        try:
            super().peek()
        except RuntimeError as error:
            self._members.failed(self._ticket, error)
        self._members.settle(self._ticket)
        self._ticket = None  # settled: the store may forget it

    def regroup(self, mesh: Mesh) -> None:
        """Continue with other members. A pending mean that counts has arrived; another one waits
        for `relaunch`. Collective."""
        ticket = self._ticket if self.in_flight else None
        if ticket is not None and self._members.counts(ticket):
            self._runner.wait(count=False)
        else:
            self._runner.give_up()
            if ticket is not None:
                self.buffer.copy_(self._sent)
                self._again = True
        self._ticket = None
        self._make_group(mesh)

    def relaunch(self) -> None:
        """After `regroup`: send the pending mean again if it does not count. It averages the
        survivors' contributions. Collective."""
        if self._again:
            self._again = False
            self._bytes_sent += self.bytes_per_mean()
            self._launch()

    def close(self) -> None:
        try:
            self.peek()
        except MemberLost:
            self._runner.give_up()  # nobody needs it any more
            self.in_flight = False
        super().close()

    def state_dict(self, arriving: bool = False) -> dict[str, Any]:
        return {**super().state_dict(arriving), "again": self._again}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._ticket = None
        self._again = state.get("again", False)  # a run of fixed replicas may have saved it
        if self._again:  # a newcomer has sent nothing
            self.buffer.zero_()
            self._sent.zero_()
            self._weights = {}


def send_state(
    state: Any,
    whole: Callable[[], object],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    members: Members,
) -> Callable[[], object]:
    """Send nested dicts, lists and tuples of tensors and plain values, in a thread. The group's
    collectives may run at the same time.

    Args:
        state: a copy that nobody else changes.
        whole: waits until the copy is whole.
        ranks: to whom, of a CPU group.
        members: of the group. An error that is no loss of one of them ends this one.
    Returns:
        A function that waits until all is sent, or the group has ended.
    """
    sockets = members.sockets

    def send() -> None:
        try:
            whole()
            content = io.BytesIO()
            torch.save(state, content)
            payload = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
            for rank in ranks:
                group.send([torch.tensor([payload.numel()])], rank, _TAG).wait()
                group.send([payload], rank, _TAG).wait()
        except (RuntimeError, MemoryError):
            # Somebody is lost, or there is no memory for the copy. A newcomer that has not got all
            # of it ends, and must not wait for the rest.
            sockets.cut()
        except Exception as error:
            members.thread_failed(error)

    thread = threading.Thread(target=send, name="handover", daemon=True)
    thread.start()
    return lambda: thread_ended(thread, sockets)


def receive_state(group: dist.ProcessGroup, rank: int) -> Any:
    """Receive the state that `send_state` sends on this rank of the group. Raises `RuntimeError` if
    that worker is lost meanwhile."""
    # Not dist.recv and dist.send, which ask for the ranks of the members in the default group.
    length = torch.empty(1, dtype=torch.int64)
    until_cut(lambda: group.recv([length], rank, _TAG).wait())
    payload = torch.empty(int(length), dtype=torch.uint8)
    until_cut(lambda: group.recv([payload], rank, _TAG).wait())
    read = io.BytesIO(payload.numpy().tobytes())
    return torch.load(read, map_location="cpu", weights_only=True)
