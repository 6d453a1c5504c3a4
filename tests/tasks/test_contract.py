"""What the training loop expects of every task (co2/task.py). A task is covered by being in TASKS;
what makes it small stands in tests/tasks/small.py."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from co2.config import Validation
from co2.errors import ConfigError
from co2.limits import limits
from co2.task import Batch, Planned
from tasks import TASKS
from tests.grids import grid, nonempty
from tests.tasks.build import drawn, mesh, sampler
from tests.tasks.small import SMALL, equal, small_task, tensors
from tests.workers import Pool

WORKERS = 3
Make = Callable[..., Any]
"""Takes the number of workers, and what `built` takes."""


def test_every_task_has_an_entry() -> None:
    assert {name.split()[0] for name in SMALL} == set(nonempty(TASKS))


@pytest.fixture(params=SMALL)
def name(request: pytest.FixtureRequest) -> str:
    """Every entry."""
    return request.param


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data sets that have been written, by the task's entry."""
    return {"folder": tmp_path_factory.mktemp("small")}


@pytest.fixture
def path(name: str, data: dict[str, Path]) -> Path | None:
    """Of the task's data set."""
    entry = SMALL[name]
    if entry.data is not None and name not in data:
        data[name] = entry.data(data["folder"] / name)
    return data.get(name)


@pytest.fixture
def make(name: str, root: Path, path: Path | None) -> Make:
    return partial(small_task, name, root, path)


@pytest.fixture
def task(make: Make) -> Any:
    """For one worker."""
    return make()


@contextmanager
def generators_stay() -> Iterator[None]:
    """Fails if a global generator of random numbers moves; each test begins elsewhere in them."""

    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]

    now = time.time_ns() % 2**32
    random.seed(now), np.random.seed(now), torch.manual_seed(now)
    *others, of_torch = states()
    yield
    *others_after, of_torch_after = states()
    assert others == others_after and torch.equal(of_torch, of_torch_after)


def same_state(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def test_the_model_depends_on_the_seed_alone(make: Make) -> None:
    models = []
    for seed in (3, 3, 4):
        with generators_stay():
            models.append(make(seed=seed).model())
    first, again, other = (list(model.parameters()) for model in models)
    assert same_state(models[0], models[1])
    assert not all(map(torch.equal, first, other)) and all(map(torch.equal, first, again))


def num_parameters(task: Any) -> int:
    with torch.device("meta"), generators_stay():
        model = task.model()
        task.optimizer(model)
    assert all(weight.is_meta for weight in model.parameters())
    return sum(weight.numel() for weight in model.parameters())


def test_every_size_is_built_on_meta(name: str, make: Make) -> None:
    """In the order of the sizes. No data are needed where the task is of a size."""
    kind = get_type_hints(TASKS[name.split()[0]].Config).get("size")
    if kind is None:
        assert num_parameters(make()) > 0
        return
    assert issubclass(kind, Enum)
    sizes = [num_parameters(make(size=size, **SMALL[name].whole)) for size in nonempty(kind)]
    assert all(one < other for one, other in pairwise(sizes))


def test_a_model_on_meta_has_the_shapes_of_the_real_one(task: Any) -> None:
    with torch.device("meta"):
        planned = task.model()
    made = task.model().state_dict()
    assert {key: (value.shape, value.dtype) for key, value in made.items()} == {
        key: (value.shape, value.dtype) for key, value in planned.state_dict().items()
    }


def test_the_optimizer_has_every_weight_once(name: str, task: Any) -> None:
    """And the peak rate of each of its groups, which the schedule starts from."""
    model = task.model()
    groups = task.optimizer(model).param_groups
    held = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(held) == sorted(id(weight) for weight in model.parameters())
    assert {group["initial_lr"] for group in groups} == {SMALL[name].lr}


def drawn_by(worker: int, task: Any, number: int, start: int = 0) -> list[Batch]:
    return drawn(task, number, start, mesh(worker, WORKERS))


def draws_per_epoch(name: str, task: Any) -> int:
    return sampler(task, SMALL[name].samples(task), WORKERS).draws_per_epoch


def test_a_batch_is_a_function_of_seed_draw_and_worker(name: str, make: Make) -> None:
    """So training goes on from any draw; also over the end of an epoch."""

    def made(seed: int = 0) -> Any:
        return make(WORKERS, seed=seed)

    task = made()
    epoch = draws_per_epoch(name, task)
    assert epoch >= 2
    with generators_stay():
        whole = drawn_by(1, task, epoch + 3)
    for start in (0, 1, epoch - 1, epoch, epoch + 1):
        with generators_stay():
            again = drawn_by(1, made(), 2, start)
        assert all(map(equal, again, whole[start : start + 2]))
    others = [drawn_by(2, task, 1)[0], drawn_by(1, made(1), 1)[0], whole[1], whole[epoch]]
    assert not any(equal(whole[0], other) for other in others)


def test_workers_share_no_sample_in_an_epoch(name: str, make: Make) -> None:
    task = make(WORKERS)
    epoch, size = draws_per_epoch(name, task), SMALL[name].batch_size
    seen = [
        row.numpy().tobytes()
        for worker in range(WORKERS)
        for batch in drawn_by(worker, task, epoch)
        for row in SMALL[name].inputs(batch)
    ]
    assert len(seen) == len(set(seen)) == epoch * size * WORKERS


def test_a_sample_depends_on_seed_and_epoch_alone(name: str, make: Make) -> None:
    """Not on its place in a batch, or on the worker. Where something is drawn, such as a crop or a
    mask, each epoch has another."""
    if not SMALL[name].by_sample:
        return
    size = SMALL[name].batch_size
    alone = make(batch_size=size * WORKERS)
    task = make(WORKERS)
    samples, epoch = sampler(task, SMALL[name].samples(task), WORKERS), draws_per_epoch(name, task)
    found: dict[int, list[list[Tensor]]] = {}
    shares = [drawn_by(worker, task, 2 * epoch) for worker in range(WORKERS)]
    for draw, whole in enumerate(islice(alone.batches(mesh(), 0), 2 * epoch)):
        parts = list(zip(*(tensors(share[draw]) for share in shares), strict=True))
        rows = [torch.cat(part) for part in parts]
        pairs = zip(rows, tensors(whole), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if len(b) == size * WORKERS)
        of = [samples.indices(draw, worker).tolist() for worker in range(WORKERS)]
        for row, sample in enumerate(chain(*of)):
            found.setdefault(sample, []).append([part[row] for part in rows])
    twice = nonempty(both for both in found.values() if len(both) == 2)
    changed = [not all(map(torch.equal, *both)) for both in twice]
    assert not any(changed) if SMALL[name].fixed else sum(changed) > 0.9 * len(changed)


def test_loading_in_processes_changes_nothing(name: str, make: Make) -> None:
    if not SMALL[name].in_processes:
        with pytest.raises(ConfigError, match=r"^data\.workers=2: "):
            make(workers=2)
        return
    alone, helped = (make(WORKERS, workers=number) for number in (0, 2))
    start = draws_per_epoch(name, alone) - 1
    both = (drawn_by(1, task, 3, start) for task in (alone, helped))
    assert all(map(equal, *both))
    model = alone.model()
    assert helped.evaluate(model) == alone.evaluate(model)


def test_a_plan_has_room_for_every_batch(make: Make) -> None:
    """Of `Planned`: the types of real batches, and shapes that are no smaller."""
    task = make(WORKERS)
    assert isinstance(task, Planned)
    pace = task.pace
    assert 0 < pace.mfu < 1 and pace.source and pace.samples_per_s is None, "no files to decode"
    blank = task.blank()
    for batch in drawn_by(0, task, 3):
        assert type(batch) is type(blank)
        for real, planned in zip(tensors(batch), tensors(blank), strict=True):
            assert real.dtype == planned.dtype and real.dim() == planned.dim()
            assert all(a <= b for a, b in zip(real.shape, planned.shape, strict=True))


def test_the_smallest_batch_has_a_finite_loss(name: str, make: Make) -> None:
    """A scalar in fp32, under autocast too, with a gradient for every weight."""
    smallest = SMALL[name].smallest
    if smallest > 1:
        with pytest.raises(ConfigError, match=rf"^train\.batch_size={smallest - 1}: "):
            make(batch_size=smallest - 1)
    task = make(batch_size=smallest)
    model, (batch,) = task.model(), drawn(task)
    torch.manual_seed(0)  # for dropout
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.shape == () and loss.dtype == torch.float32 and loss.isfinite()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters()
    )
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = task.loss(task.model(), batch)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(loss.item(), rel=0.1)


def test_it_learns_a_batch_by_heart(name: str, task: Any) -> None:
    """Within its steps, of which most entries need few."""
    model, (batch,) = task.model(), drawn(task)
    optimizer, losses = task.optimizer(model), []
    for _ in range(SMALL[name].steps):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < SMALL[name].left * losses[0]:
            return
    raise AssertionError(losses)


def scores(rank: int, world: int, make: Make) -> tuple[dict[str, float], dict[str, float]]:
    task = make(world)
    return task.evaluate(task.model()), task.baselines()


@pytest.mark.parametrize("world", grid((2, 3), lambda world: world == 2))
def test_an_evaluation_is_the_same_for_any_number_of_workers(
    workers: Pool, make: Make, world: int
) -> None:
    alone = scores(0, 1, make)
    assert next(iter(alone[0])) == "loss"
    assert all(map(math.isfinite, (*alone[0].values(), *alone[1].values())))
    assert workers.run(scores, world, make) == [alone] * world


def test_an_evaluation_counts_every_sample_once(name: str, make: Make) -> None:
    """So the whole part is the mean of its halves, which have no sample in common."""
    entry, sizes, losses, model = SMALL[name], [], [], None
    unlimited = {"eval_samples": None} if "eval_samples" in entry.config else {}
    for part in Validation:
        task = make(validation=part, **unlimited, **entry.exact)
        model = task.model() if model is None else model
        facts = task.fingerprint()["evaluated"]
        assert facts["part"] == part.value
        sizes.append(facts["num_samples"])
        losses.append(task.evaluate(model)["loss"])
    whole, report, tuning = sizes
    assert whole == report + tuning and min(report, tuning) > 0 and losses[1] != losses[2]
    if entry.weighs_alike:
        mean = (report * losses[1] + tuning * losses[2]) / whole
        assert losses[0] == pytest.approx(mean, rel=1e-5)


LIMITED = [name for name in SMALL if "eval_samples" in limits(TASKS[name.split()[0]].Config)]


@pytest.mark.parametrize("name", nonempty(LIMITED))
def test_an_evaluation_may_take_some_samples(make: Make) -> None:
    whole = make(eval_samples=None)
    available = whole.fingerprint()["evaluated"]["num_samples"]
    for wanted, taken in ((3, 3), (10**9, available)):
        some = make(eval_samples=wanted)
        assert some.fingerprint()["evaluated"]["num_samples"] == taken
    model, some = whole.model(), make(eval_samples=3)
    assert some.evaluate(model)["loss"] != whole.evaluate(model)["loss"]


def test_an_evaluation_changes_nothing(task: Any) -> None:
    """Neither weights, nor buffers, nor the mode of any module, nor generators."""
    model = task.model()
    frozen = list(model.modules())[-1].eval()  # by its owner
    before = {key: value.clone() for key, value in model.state_dict().items()}
    baselines = task.baselines()
    with generators_stay():
        first = task.evaluate(model)
        again = task.evaluate(model)
    assert first == again and task.baselines() == baselines
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [one for one in model.modules() if not one.training] == [frozen]
    assert all(weight.grad is None for weight in model.parameters())


def test_an_evaluation_of_broken_weights_says_so(task: Any) -> None:
    model = task.model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(math.nan)
    assert math.isnan(task.evaluate(model)["loss"])


def test_a_fingerprint_can_be_written_down(make: Make) -> None:
    """And is that of the data, whatever else a run has chosen."""
    facts = [make(number).fingerprint() for number in (1, 2)]
    assert facts[0] == facts[1] == json.loads(json.dumps(facts[0]))


def test_too_many_workers_for_the_data(name: str, make: Make) -> None:
    size = SMALL[name].smallest
    samples = SMALL[name].samples(make())
    with pytest.raises(ConfigError, match=rf"^launch\.workers={samples + 1}: "):
        make(samples + 1, batch_size=size)
    with pytest.raises(ConfigError, match=rf"^train\.batch_size={samples}: 2 workers draw "):
        make(2, batch_size=samples)
