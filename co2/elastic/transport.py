"""RecoveringMean: a mean that counts, whoever is lost meanwhile.

A mean counts once all members have it (co2/elastic/members.py). What was sent is kept, so that
those who are left can take the mean again: `wait` has the members renewed and returns a mean of
those who had sent. All of them find out at the same mean, because the members decide about one
after the other in the same order, and so all go on from the same place of the same step.

Where replicas make unequal numbers of steps in a round, they weigh as much as they have made.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.mesh import Mesh
from co2.config import CommConfig
from co2.elastic.members import MemberLost
from co2.elastic.reports import Ticket

if TYPE_CHECKING:
    from co2.elastic.replicas import Replicas


class RecoveringMean(BackgroundMean):
    """See `BackgroundMean`. It holds one vector more: what was sent last.

    Args:
        replicas: whose mean it is. They renew their members in `wait`, and call `regroup` and
            `relaunch` of every mean.
    """

    def __init__(
        self,
        replicas: "Replicas",
        numel: int,
        mesh: Mesh,
        config: CommConfig,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(numel, mesh, config, dtype, device)
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
        """Wait for the collective and for what the members decide, and recover if one is lost: the
        computation stands still all the time."""
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
        """Go on among other members. Collective. A mean under way has arrived, if it counts, or
        will be sent again."""
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
        """After `regroup`: take the mean that does not count anew, of those who were there when it
        was sent. Collective."""
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
