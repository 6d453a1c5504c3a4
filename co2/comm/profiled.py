"""Collectives of gloo's that are launched while torch.profiler records.

gloo's thread writes the end of such a collective into the profiler's memory, which is freed when
the profiler stops. One that ends later writes into memory that has become somebody else's, and the
process dies in a place that has nothing to do with it. So what may outlive the step in which it is
launched is given to `note`, and the profiler stops after `end`.

A collective of a thread of ours is not recorded, and NCCL's ends for the profiler at its launch.
"""

from contextlib import suppress

import torch.distributed as dist

from co2.comm.waiting import Connections, finish, in_use

_noted: list[tuple[dist.Work, object, Connections | None]] | None = None
"""None while nothing is recorded."""


def begin() -> None:
    """The profiler is about to record."""
    global _noted
    _noted = []


def note(work: dist.Work, group: object) -> dist.Work:
    """Return the collective, which is gloo's, of the group. `end` waits for it if the profiler
    records."""
    if _noted is not None:
        _noted.append((work, group, in_use()))
    return work


def end(wait: bool = True) -> bool:
    """Wait for all collectives that were noted since `begin`. Nothing is noted any more.

    Args:
        wait: False where one of them may wait for a worker that is gone.
    Returns:
        Whether the profiler may stop. It must not where one was not waited for, or never ends,
        because it was forgotten when its connections were cut.
    """
    global _noted
    noted, _noted = _noted or [], None
    if not wait:
        return not noted
    for work, group, sockets in noted:
        with suppress(RuntimeError):  # its owner waits for it too, and meets the error there
            finish(work, group, sockets)
    return all(work.is_completed() for work, _, _ in noted)
