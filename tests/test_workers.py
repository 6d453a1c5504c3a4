"""The pool of workers: errors come back, deadlocks end, and the pool goes on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.workers import Pool, TimeLimit, WorkerError


def total(rank: int, world: int, factor: int) -> tuple[int, torch.Tensor]:
    tensor = torch.tensor([float(factor * (rank + 1))])
    dist.all_reduce(tensor)
    return rank, tensor


def one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("only on rank one")
    dist.barrier()


def leave(rank: int, world: int, makes_a_group: bool) -> int:
    if makes_a_group:
        dist.new_group()
    return rank


def wait_forever(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(3600)


def test_results_come_by_rank(workers: Pool) -> None:
    for world, expected in ((1, 5.0), (2, 15.0), (4, 50.0)):
        results = workers.run(total, world, 5)
        assert [rank for rank, _ in results] == list(range(world))
        assert all(tensor.item() == expected for _, tensor in results)


@pytest.mark.parametrize("makes_a_group", [False, True])
def test_ranks_need_not_communicate(workers: Pool, makes_a_group: bool) -> None:
    for _ in range(30):  # without a barrier about one in fifty failed or hung
        assert workers.run(leave, 4, makes_a_group) == [0, 1, 2, 3]


def test_an_error_comes_back_with_its_traceback(workers: Pool) -> None:
    with pytest.raises(WorkerError, match=r"rank 1:(.|\n)*one_raises(.|\n)*only on rank one"):
        workers.run(one_raises, 2)
    assert workers.run(total, 2, 1)[0][1].item() == 3.0


def print_and(rank: int, world: int, text: str, fail: bool) -> None:
    os.write(2, text.encode())  # as C++ does
    assert not fail


def test_what_a_failed_case_has_printed_is_told(
    workers: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    workers.run(print_and, 2, "before", False)
    with pytest.raises(WorkerError, match="beyond Python's reach") as failed:
        workers.run(print_and, 2, "beyond Python's reach", True)
    assert "before" not in str(failed.value)
    assert capfd.readouterr() == ("", "")


def test_a_deadlock_is_a_failure() -> None:
    pool = Pool(2)
    pool.run(total, 2, 1)
    with pytest.raises(TimeLimit, match=r"ranks \[0, 1\] of 2"):  # the second waits for the first
        pool.run(wait_forever, 2, time_limit_s=3.0)
    assert pool.run(total, 2, 1)[0][1].item() == 3.0
    pool.close()
