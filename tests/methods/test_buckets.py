"""Buckets bound the size of a collective and change nothing else: every element is reduced."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import co2
from co2.comm.background_mean import BackgroundMean
from co2.methods import METHODS
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.collectives import Recorder
from tests.methods.driver import DENSE, SETTINGS, assert_same
from tests.workers import Pool, replicas

ITEM = 8
"""Bytes of a double."""
LAYOUTS = [([6, 6, 6], 10), ([20], 10), ([7, 3, 7, 3], 8), ([5], 1), ([3, 4], 7), ([3, 4], 100)]
"""Sizes of the parameters, and elements of a bucket."""
ROUNDS = 4


def comm(bucket: int) -> co2.CommConfig:
    return co2.CommConfig(bucket_mb=bucket * ITEM / 2**20)


def _trained(
    rank: int, name: str, sizes: Sequence[int], comm: co2.CommConfig | None
) -> tuple[list[list[Tensor]], list[int]]:
    """The weights after each step, and the elements of every collective."""
    model, optimizer = problem.build_drift(sizes)
    method = METHODS[name](METHODS[name].Config(**SETTINGS[name]), comm=comm)
    method.prepare(model, optimizer, co2.Mesh.world())
    history = []
    with Recorder() as recorder:
        for step in range(ROUNDS * SETTINGS[name]["tau"]):
            problem.backward_drift(model, step, rank)
            method.step()
            history.append([weight.detach().clone() for weight in model.parameters()])
    method.flush()
    return history, [numel for _, call, numel, *_ in recorder.log if call == "all_reduce"]


@replicas(2)
@pytest.mark.parametrize("name", grid(DENSE, OF_A_KIND.__contains__))
def test_buckets_change_nothing(rank: int, name: str) -> None:
    fragments = SETTINGS[name].get("fragments", 1)  # a layer each at least; here all are of one
    for sizes, bucket in (layout for layout in LAYOUTS if len(layout[0]) >= fragments):
        expected, one = _trained(rank, name, sizes, None)
        history, numels = _trained(rank, name, sizes, comm(bucket))
        assert_same(history, expected)
        assert one == [sum(sizes[part::fragments]) for part in range(fragments)] * ROUNDS
        assert max(numels) <= bucket
        assert sum(numels) == sum(sizes) * ROUNDS


def means(rank: int, world: int) -> None:
    for sizes, bucket in LAYOUTS:
        numel = sum(sizes)
        mean = BackgroundMean(numel, co2.Mesh.world(), comm(bucket), torch.float64, "cpu")
        assert mean.wait() is None, "nothing was started"
        assert not mean.in_flight
        base = torch.arange(numel, dtype=torch.float64) + 1
        for scale in (1.0, -3.0):
            vector = scale * base * (rank + 1)
            mean.start(vector)
            assert mean.in_flight
            vector.zero_()  # it was copied
            assert torch.equal(_arrived(mean), scale * base * (world + 1) / 2)
            assert not mean.in_flight
            assert mean.wait() is None, "it arrives once"
        mean.buffer.copy_(base * (rank + 1))
        mean.start()
        assert torch.equal(_arrived(mean), base * (world + 1) / 2)


def _arrived(mean: BackgroundMean) -> Tensor:
    arrived = mean.wait()
    assert arrived is not None
    return arrived


@pytest.mark.parametrize("world", [1, 2, 4])
def test_background_mean(workers: Pool, world: int) -> None:
    workers.run(means, world)
