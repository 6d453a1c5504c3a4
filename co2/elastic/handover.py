"""A newcomer gets its state from one of the others, which trains on meanwhile."""

import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from co2.comm.waiting import thread_ended, until_cut
from co2.elastic.sockets import Sockets

_TAG = 1


def give(
    state: Any,
    whole: Callable[[], object],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    sockets: Sockets,
    failed: Callable[[Exception], None],
) -> Callable[[], object]:
    """Begin to send nested dicts, lists and tuples of tensors and plain values, in a thread. The
    group's collectives may go on at the same time.

    Args:
        state: a copy that nobody else changes.
        whole: waits until the copy is whole.
        ranks: to whom, of a CPU group.
        sockets: those of the group.
        failed: called by the thread with an error that is no loss of a member.
    Returns:
        What waits until all is sent, or cannot be sent any more because the group has ended.
    """

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
            failed(error)

    thread = threading.Thread(target=send, name="handover", daemon=True)
    thread.start()
    return lambda: thread_ended(thread, sockets)


def receive(group: dist.ProcessGroup, rank: int) -> Any:
    """What the one with this rank in the group gives this worker. Raises `RuntimeError` if it is
    lost meanwhile. `Any`: see `give`."""
    # Not dist.recv and dist.send, which ask for the ranks of the members in the default group.
    length = torch.empty(1, dtype=torch.int64)
    until_cut(lambda: group.recv([length], rank, _TAG).wait())
    payload = torch.empty(int(length), dtype=torch.uint8)
    until_cut(lambda: group.recv([payload], rank, _TAG).wait())
    read = io.BytesIO(payload.numpy().tobytes())
    return torch.load(read, map_location="cpu", weights_only=True)
