"""Members that may be lost, on GPUs: under NCCL, and through the host."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from co2.comm.runners import CudaRunner
from co2.comm.waiting import everyone, use
from co2.elastic.members import Members
from co2.elastic.sockets import Sockets
from tests.cli.test_elastic import STEPS, assert_no_step_is_missing, changes, disturbed, words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BOTH = "cpu:gloo,cuda:nccl"
ELASTIC = (
    *(f"train.steps={STEPS}", "train.eval_every=30", "log.every=1", "checkpoint.every=0"),
    *("launch.elastic=true", "launch.silent_s=20", "launch.backend=auto", "toy.delay_s=0.02"),
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.fixture
def alone() -> Iterator[Members]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = Members(("127.0.0.1", store.port), 0, 30.0, BOTH)
    members.first((0,))
    members.formed()
    yield members
    members.leave()


def test_a_lane_tells_how_it_ended(alone: Members) -> None:
    told: list[bool] = []
    runner = CudaRunner()
    buffer = torch.ones(1 << 20, device="cuda")
    runner.launch(buffer.split(1 << 18), everyone(), told.append)
    copied = torch.empty(1 << 20, pin_memory=True)
    arrived = runner.copy(buffer, copied)
    runner.wait()
    arrived()
    assert told == [True] and copied.eq(1).all()
    sockets = Sockets()
    use(sockets)
    torch.cuda._sleep(200_000_000)  # it has not ended yet when they are cut
    runner.launch(buffer.split(1 << 18), everyone(), told.append)
    arrived = runner.copy(buffer, copied)
    sockets.cut()
    runner.wait()
    with pytest.raises(RuntimeError, match="aborted"):
        arrived()
    runner.close()
    assert told == [True, False]


def test_a_generation_follows_another(alone: Members) -> None:
    """Groups of NCCL are aborted and made anew."""
    for turn in range(3):
        mine = torch.full((1000,), float(turn), device="cuda")
        dist.all_reduce(mine, group=everyone())
        assert mine.eq(turn).all()
        alone.renew(admit=False)
        alone.formed()


def check(tmp_path: Path, *more: str, restarts: int) -> None:
    arguments = (*ELASTIC, *words("co2"), "launch.workers=2", f"launch.restarts={restarts}", *more)
    status, folder, text = disturbed(
        tmp_path, *arguments, at=32, victims=(1,), number=signal.SIGKILL
    )
    assert status == 0, text
    assert_no_step_is_missing(folder)
    assert len(changes(folder)[-1]["members"]) == 1 + restarts
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["device"].startswith("cuda")
    assert summary["final"]["accuracy"] > 0.6


@pytest.mark.parametrize("restarts", [0, 1])
def test_those_that_are_left_go_on_through_the_host(tmp_path: Path, restarts: int) -> None:
    check(tmp_path, "comm.device=cpu", restarts=restarts)


@two_gpus
@pytest.mark.parametrize("restarts", [0, 1])
def test_those_that_are_left_go_on_under_nccl(tmp_path: Path, restarts: int) -> None:
    check(tmp_path, restarts=restarts)
