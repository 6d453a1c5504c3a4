"""BackgroundMean: a private snapshot, one collective in flight, and a wait for its result.

No collective touches live parameters. Nothing here decides when to communicate: the method calls
`start` and `wait` at steps that are the same on every worker.

Where replicas may come and go (co2/elastic/members.py), a mean counts only once all members have
it. Of one that is under way what was sent is kept, so that those who are left can take it again.
Where replicas make unequal numbers of steps in a round, they weigh as much as they have made.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from co2.comm.clocks import CommTotals
from co2.comm.collectives import carries
from co2.comm.lanes import CudaLane, HostLane, Lane
from co2.comm.mesh import Mesh
from co2.comm.phases import WAIT
from co2.config import CommConfig, Precision
from co2.elastic.members import MemberLost, Members
from co2.elastic.watch import Ticket
from co2.errors import require

_ARRIVING = ContextVar("arriving", default=False)


@dataclass(frozen=True)
class Arriving:
    """In a state: a buffer that a collective still writes."""

    buffer: Tensor
    copy_to: Callable[[Tensor], Callable[[], object]]
    """Copies the buffer into a tensor of its size and type as soon as the collective is over, and
    before anybody else can change it. Called by the thread that trains, while the state is new.
    What it returns waits for the copy, in any thread, and raises `RuntimeError` if the collective
    has failed."""


@contextmanager
def without_joining() -> Iterator[None]:
    """Inside, states are taken without waiting for a mean that is under way: `Arriving` stands for
    its buffer. For a sequence (`BackgroundMean.run`) they wait, because it may change more."""
    before = _ARRIVING.set(True)
    try:
        yield
    finally:
        _ARRIVING.reset(before)


class BackgroundMean:
    """The mean of a vector over the replicas, taken in the background.

    Args:
        numel: elements of the vector.
        mesh: the replicas. With one replica the mean is the vector itself, and nothing is sent.
        config: the size of a bucket, and whether bf16 travels: the buffer then has that type.
        dtype, device: those of the vector. In the host's memory gloo carries it, wherever the
            model is.
    Raises:
        ConfigError: the vector is on a GPU, but the process group reaches only the host's memory.
    """

    def __init__(
        self,
        numel: int,
        mesh: Mesh,
        config: CommConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        config = config or CommConfig()
        if config.dtype is Precision.bf16:
            dtype = torch.bfloat16
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)
        self.in_flight = False
        """Whether a result is due: it was started and has not been waited for."""
        self.num_replicas = mesh.num_replicas
        self.group = mesh.new_group_across_replicas(
            None if self.buffer.device.type == mesh.device.type else "gloo"
        )
        hint = "the process group is gloo's, for host memory; use cpu, or a group with nccl"
        require(carries(self.group, self.buffer), "comm.device", config.device.name, hint)
        bucket = max(1, int(config.bucket_mb * 2**20) // self.buffer.element_size())
        self._buckets = self.buffer.split(bucket)
        self._lane: Lane = CudaLane() if self.buffer.is_cuda else HostLane()
        self.members = mesh.members
        self._ticket: Ticket | None = None
        """Of the pending collective; None where nothing was sent."""
        self._sent: Tensor | None = None
        """A copy of what was sent, where members may be lost; None where the caller sends again."""
        self._weights: Mapping[int, int] = {}
        """Weight of each member in the pending mean."""
        self._again = False
        """Whether the pending collective was given up and waits for `launch_again`."""
        self._sequence = False
        """Whether the pending collective is more than a mean."""
        self._comm_s = self._exposed_s = 0.0
        self._bytes_sent = 0

    def start(self, vector: Tensor | None = None) -> None:
        """Launch the mean of `vector`, which is copied first; None: of what `buffer` holds.

        From here to `wait` the buffer belongs to the collective.
        """
        self._depart()
        if vector is not None:
            self.buffer.copy_(vector)
        if self.members is not None:
            self._keep()
        self._weigh()
        self._launch()

    def _keep(self) -> None:
        """Keep what is sent."""
        if self._sent is None:
            self._sent = torch.empty_like(self.buffer)
        self._sent.copy_(self.buffer)

    def _weigh(self) -> None:
        """Scale the buffer so that the mean is weighted by steps."""
        if self.members is not None:
            self._weights = self.members.weights()
            self._scale(self.members)

    def _scale(self, members: Members) -> None:
        """Pre-scale the buffer so that a plain average equals the weighted one."""
        together = sum(self._weights.get(one, 0) for one in members.ids)
        own = self._weights.get(members.me, 0)
        if own * self.num_replicas != together:
            self.buffer.mul_(own * self.num_replicas / together)

    def _launch(self) -> None:
        members, ticket = self.members, None
        if members is not None:
            ticket = self._ticket = members.open()
        if self.num_replicas > 1 and self.buffer.numel() > 0:
            ended = None if members is None else lambda well: _told(members, ticket, well)
            self._lane.launch(self._buckets, self.group, ended)
        else:
            _told(members, ticket, True)

    def run(self, sequence: Callable[[], None], num_bytes: int | None = None) -> None:
        """Launch `sequence` in place of a mean: blocking collectives of `group`, with arithmetic
        between them.

        On a CPU a thread runs it, and `wait` raises an error that occurs in it. On CUDA it is
        queued here, on a stream of its own. A single replica runs it at once.

        Args:
            sequence: leaves its result in `buffer`.
            num_bytes: what this worker sends in it; None: as much as for a mean.
        """
        self._depart(num_bytes)
        self._sequence = True
        if self.num_replicas > 1:
            self._lane.run(sequence)
        else:
            sequence()

    def mark_arrived(self) -> None:
        """Make what the caller has put into `buffer` the result of the next `wait`. Nothing is
        sent."""
        self._depart(num_bytes=0)

    def mean_now(self) -> Tensor:
        """Take the mean of what `buffer` holds, and wait for it: the blocking mean. If a member is
        lost, `buffer` has to be written again."""
        self._depart()
        self._weigh()
        self._launch()
        try:
            mean = self.wait()
        except MemberLost:
            self.in_flight = False
            raise
        assert mean is not None
        return mean

    def wait(self) -> Tensor | None:
        """Wait for what was started last and return it, in `buffer`; None if nothing was.

        Raises:
            MemberLost: it does not count. It stays in flight: `regroup` and `launch_again` follow.
        """
        if not self.in_flight:
            return None
        with record_function(WAIT):
            self._wait()
        self.in_flight = False
        return self.buffer

    def _wait(self, count: bool = True) -> None:
        try:
            self._lane.wait(count)
        except RuntimeError as error:
            if self.members is None or self._ticket is None:
                raise
            self.members.failed(self._ticket, error)
        if self.members is not None and self._ticket is not None:
            self.members.settle(self._ticket)

    def regroup(self, mesh: Mesh) -> None:
        """Make the process group of other members. Collective. What was under way has arrived, if
        it counts, or has to be launched again."""
        assert self.members is not None
        ticket = self._ticket if self.in_flight else None
        if ticket is not None and self.members.counts(ticket):
            self._lane.wait(count=False)
        else:
            self._lane.give_up()
            if ticket is not None:
                assert self._sent is not None, "a mean that blocks is not in flight here"
                self.buffer.copy_(self._sent)
                self._again = True
        self._ticket = None
        self.num_replicas = mesh.num_replicas
        self.group = mesh.new_group_across_replicas(
            None if self.buffer.device.type == mesh.device.type else "gloo"
        )

    def launch_again(self) -> None:
        """After `regroup`: take the mean anew that does not count, of those who were there when it
        was sent. Collective."""
        if not self._again:
            return
        assert self.members is not None
        self._again = False
        self._scale(self.members)
        self._bytes_sent += self.bytes_per_mean()
        self._launch()

    def close(self) -> None:
        """Wait for what is in flight and release the process group; nothing starts after it.

        Only then does destroying the group join its threads, which would otherwise live on until
        the process exits.
        """
        try:
            self.wait()
        except MemberLost:
            self._lane.give_up()  # nobody needs it any more
        finally:
            self._lane.close()
            self.group = None

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: a ring sends 2(G−1)/G of the vector."""
        payload = self.buffer.numel() * self.buffer.element_size()
        return 2 * (self.num_replicas - 1) * payload // self.num_replicas

    def totals(self) -> CommTotals:
        """Totals so far. What a GPU has not finished is not in them yet."""
        self._comm_s += sum(self._lane.comm.take())
        self._exposed_s += sum(self._lane.exposed.take())
        return CommTotals(self._comm_s, self._exposed_s, float(self._bytes_sent))

    def join(self) -> None:
        """Wait until what is in flight is over, without taking it: the next `wait` still returns
        it. This wait does not count as exposed."""
        if not self._again:
            self._wait(count=False)

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from here. Joins what is in flight, and has the buffer only then.

        Inside `without_joining` it does not join a mean, and `comm_s` lacks what is under way.
        """
        buffer: Tensor | Arriving = self.buffer
        if _ARRIVING.get() and not self._sequence:
            buffer = Arriving(self.buffer, lambda target: self._lane.copy(self.buffer, target))
        else:
            self.join()
        totals = self.totals()
        return {
            "in_flight": self.in_flight,
            "again": self._again,
            "buffer": buffer if self.in_flight else None,
            "comm_s": totals.comm_s,
            "exposed_s": totals.exposed_s,
            "bytes_sent": self._bytes_sent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_flight = state["in_flight"]
        if self.in_flight:
            self.buffer.copy_(state["buffer"])
        self._again = state["again"]
        if self._again:
            self.buffer.zero_()
            self._keep()
            self._weights = {}
        self._comm_s, self._exposed_s = state["comm_s"], state["exposed_s"]
        self._bytes_sent = state["bytes_sent"]

    def _depart(self, num_bytes: int | None = None) -> None:
        assert not self.in_flight, "the previous mean was not waited for"
        assert self.num_replicas == 1 or self.group is not None, "closed by flush"
        self.in_flight, self._sequence, self._ticket = True, False, None
        self._bytes_sent += self.bytes_per_mean() if num_bytes is None else num_bytes


def _told(members: Members | None, ticket: Ticket | None, well: bool) -> None:
    """Tell the members, if they can change, how this one's part of a collective has ended."""
    if members is not None and ticket is not None:
        members.ended(ticket, well)
