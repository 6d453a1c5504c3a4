"""A collective whose connections are cut ends, also where gloo forgets to tell it."""

import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from co2.comm.waiting import finish, has_leaked, is_loss, until_cut, use
from co2.elastic.sockets import Sockets
from tests.workers import Pool

TRIALS = 40


@pytest.fixture
def fresh(workers: Pool) -> Iterator[Pool]:
    """Workers whose threads no other test meets: some wait until their time is out."""
    workers.close()
    yield workers
    workers.close()


def cut_again_and_again(rank: int, world: int, numel: int, longest_s: float) -> tuple[int, int]:
    """Collectives that are cut as they begin or amid. Returns how many have failed, and how many
    have ended well."""
    random.seed(rank)
    failed = 0
    for _ in range(TRIALS):
        sockets = Sockets()
        with sockets.opening():
            group = dist.new_group(list(range(world)))
        dist.barrier()
        work = dist.all_reduce(torch.ones(numel), group=group, async_op=True)
        time.sleep(longest_s * random.random())
        sockets.cut()
        try:
            finish(work, group, sockets)
        except RuntimeError:
            failed += 1
        del work, group  # takes the group down, unless it was leaked
    return failed, TRIALS - failed


def test_a_collective_that_is_cut_ends(fresh: Pool) -> None:
    ended = fresh.run(cut_again_and_again, 2, 3, 0.0005)
    assert all(failed > 0 for failed, _ in ended)


def act_and_cut(rank: int, world: int) -> list[str]:
    """Something that never ends by itself; something that fails; something that works."""
    found = []
    sockets = Sockets()
    use(sockets)
    try:
        until_cut(lambda: [][0])
    except IndexError as error:
        found.append(type(error).__name__)
    found.append(until_cut(lambda: "done"))
    sockets.cut()
    try:
        until_cut(lambda: time.sleep(60))
    except RuntimeError as error:
        found.append(str(error))
    found.append(f"leaked: {has_leaked()}")
    use(None)
    return found


def test_what_blocks_ends_with_the_connections(fresh: Pool) -> None:
    assert fresh.run(act_and_cut, 1) == [
        ["IndexError", "done", "what all do together was cut", "leaked: True"]
    ]


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]", True),
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:36869", True),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_an_error_of_a_lost_worker(text: str, loss: bool) -> None:
    assert is_loss(RuntimeError(text)) is loss
