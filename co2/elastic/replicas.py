"""Replicas: training goes on while replicas are lost and others come.

co2/elastic/members.py agrees on who takes part. Here the mesh and the process groups follow: all
that was made of the mesh is made anew in the same order, and means that were under way and do not
count are taken again. A loss shows where the replicas wait for each other: in the `wait` of a mean
(co2/elastic/transport.py) or in `together`. Newcomers come at the end of a step (`renew`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.config import CommConfig
from co2.elastic import handover
from co2.elastic.members import Expelled, MemberLost, Members
from co2.elastic.transport import RecoveringMean

T = TypeVar("T")
Changed = Callable[[Mapping[int, str], int, float], None]
"""Who is lost and why; how many members there were before; when the change began, as
`time.perf_counter` has it."""
_FAILURES = 5


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

    def new_mean(
        self,
        numel: int,
        mesh: Mesh,
        config: CommConfig,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> RecoveringMean:
        """See co2/comm/background_mean.py."""
        mean = RecoveringMean(self, numel, mesh, config, dtype, device)
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
        """Do what all workers do together and may do twice, until all that are left have done
        it."""
        while True:
            try:
                return self._agreed(act)
            except MemberLost:
                self.renew()

    def give(self, state: Any, whole: Callable[[], object], group: dist.ProcessGroup) -> None:
        """Begin to send newcomers with this worker's place in their replicas a copy of its state.
        See co2/elastic/handover.py."""
        ids, size = self.members.ids, self.members.replica_size
        ranks = [
            ids.index(one) for one in self.members.joined if (one - self.members.me) % size == 0
        ]
        self._given()
        members = self.members
        self._given = handover.give(
            state, whole, ranks, group, members.sockets, members.thread_failed
        )

    def receive_state(
        self,
        prepare: Callable[[], object],
        load: Callable[[Any], T],
        group: dist.ProcessGroup | None,
    ) -> T:
        """As a newcomer, go on from the state that the first replica gives. Returns what `load`
        does. `Any`: see co2/elastic/handover.py.

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
            loaded = load(handover.receive(group, self.members.me % self.members.replica_size))
            self._relaunch()
        except RuntimeError as error:
            raise Expelled("one of the others was lost as it joined") from error
        return loaded

    def close(self) -> None:
        """End what gives newcomers their state."""
        self._given()

    def _relaunch(self) -> None:
        """Take the means anew that were under way, and do not count."""
        for mean in self._means:
            mean.relaunch()

    def _agreed(self, act: Callable[[], T]) -> T:
        """Do it, and wait until all have done it. Raises `MemberLost`."""
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
        """Raise an error that comes back again and again: it is no loss of a connection."""
        self._failures += 1
        if self._failures >= _FAILURES:
            raise error
