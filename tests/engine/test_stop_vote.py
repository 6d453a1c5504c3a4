"""Stopping together, where a worker has ended without a word."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from co2.errors import WorkerLost
from co2.train.stop import StopVote

HOST = "127.0.0.1"


def last_step(vote: StopVote) -> None:
    """Go on until all stop."""
    while not vote(1):
        time.sleep(0.01)


def test_who_has_ended_is_not_waited_for() -> None:
    """Each leaves in the store where it runs."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    child = os.fork()
    if child == 0:
        own = dist.TCPStore(HOST, store.port, is_master=False)
        with StopVote(own, 1, lambda: range(2), ()):
            os._exit(0)
    os.waitpid(child, 0)
    with StopVote(store, 0, lambda: range(2), (signal.SIGUSR1,), grace_s=1e6) as vote:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(WorkerLost, match="it has ended"):
            last_step(vote)
