"""What `co2 plan` says of every published recipe, and what it refuses."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import train
from co2 import Mesh
from co2.app.plan import Need, Place, Planner, course, lines
from co2.config import Config
from co2.errors import ConfigError
from co2.gpus import GPUS
from co2.train.estimate import flops, holdings
from recipes.paper import plan as recipe
from tasks.shared import paces
from tests.cli.harness import configured, refused, tasks_at
from tests.cli.test_training import quick
from tests.grids import grid

PAPER = tasks_at("paper")
PLACE = Place("a100-80g", "80gbps", 8, 0.4)
TOO_LARGE = ("task=toy", "toy.features=20000", "toy.hidden=20000", "optim.name=adamw")
TOO_LARGE += ("toy.samples=64",)
"""400 million parameters: with CO2 11.2 GB between steps."""


def planner(*overrides: str, gpu: str = "a100-80g") -> Planner:
    return Planner(train.APP.planned, train.APP.make_task, list(overrides), GPUS[gpu].usable_bytes)


def parameters(config: Config) -> int:
    with torch.device("meta"):
        return sum(one.numel() for one in train.APP.make_task(config).model().parameters())


def facts(need: Need) -> dict[str, str]:
    return dict(lines(need, PLACE, course(need, PLACE)))


@pytest.mark.parametrize("here", [0, 1])
def test_more_gpus_than_this_machine_has(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are some, and with what only GPUs do."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    words = ("task=resnet50", "scale=paper", "method=co2", "mesh.sync_batch_norm=true")
    planner(*words, "mesh.replica_size=2").fitting(8)


def test_a_moving_average_takes_room() -> None:
    """A copy of the weights and, in a checkpoint, one of each worker."""
    words = ("task=vit", "scale=paper", "method=co2")
    with_one, without = (
        holdings(train.APP.make_task(config), config, 8)
        for config in (planner(*words, *more).config(8) for more in ((), ("train.ema_decay=null",)))
    )
    more = with_one.memory.average_bytes
    assert more == with_one.memory.parameter_bytes
    assert with_one.device_bytes == without.device_bytes + more
    assert with_one.saved_bytes == without.saved_bytes + 8 * more


NODE = ("scale=node", "method=co2")


@cache
def on_a_node(task: str) -> Need:
    return planner(*NODE, f"task={task}").fitting(8)


@pytest.mark.parametrize("task", grid(tasks_at("node"), {"resnet50", "gpt2"}.__contains__))
def test_a_node_trains_every_task_in_hours(task: str) -> None:
    """Eight replicas, of the same batch on fewer GPUs."""
    planned, need = planner(*NODE, f"task={task}"), on_a_node(task)
    assert need.num_replicas == 8
    assert {planned.config(fewer).train.global_batch for fewer in (1, 2, 4)} == {need.global_batch}
    assert course(need, PLACE).days < 0.5


def test_a_node_refuses_what_does_not_fit() -> None:
    seven = planner(*NODE, "task=transnormer", "transnormer.size=7b")
    assert not seven.need(seven.config(8), 8).fits(seven.usable), "193 GB"
    with pytest.raises(ConfigError, match=r"train\.global_batch=480: .* 8 GPUs \(--nearest\)"):
        planner(*NODE, "task=gpt2").fitting(13)


GPUS_OF = {"ade20k": 4, "shapenet": 8, "glue": 8, "graph": 8, "gpt2": 32}
"""On how many GPUs a task is planned, where its batch does not divide among 64."""
VIT_FLOPS = 3 * 2 * 17.58e9
"""Of a sample of ViT-B/16: 17.6 billion multiply-adds forward (timm's table), three times that in
training."""


@pytest.mark.parametrize("task", [task for task in PAPER if task not in ("moe", "transnormer")])
def test_every_published_recipe_has_a_plan(task: str) -> None:
    planned = planner(f"task={task}", "scale=paper", "method=co2")
    gpus = planned.nearest(64)
    assert gpus == GPUS_OF.get(task, 64)
    need = planned.fitting(gpus)
    told = facts(need)
    assert f"{need.held.num_parameters:,}" == told["parameters"]
    batch = need.config.train.batch_size * need.config.train.accumulate * gpus
    assert told["global batch"].startswith(f"{batch:,} samples")
    assert batch == need.config.train.global_batch
    assert told["GPUs"] == f"{gpus} × a100-80g, servers of 8, 80gbps"
    assert "3 model copies" in told["method's state"] and "GB on disk" in told["data"]
    assert ("moving average" in told) == (need.config.train.ema_decay is not None)
    if task == "vit":
        assert need.held.num_parameters == 86_567_656 and "moving average" in told
        assert need.flops / batch == pytest.approx(VIT_FLOPS, rel=0.01)
    found = course(need, PLACE)
    assert found.own and found.allreduce
    assert found.own.exposed_s <= found.allreduce.exposed_s
    for name, figures in (("this method", found.own), ("allreduce", found.allreduce)):
        assert told[f"exposed, {name}"].startswith(f"{figures.exposed_s:.3g} s a step, ")
    assert found.compute_s == need.flops / gpus / (0.4 * 312e12)
    assert found.days == pytest.approx(found.own.step_s * need.config.train.steps / 86_400)


@pytest.mark.parametrize(
    ("task", "parameters"), [("moe", 1_909_850_112), ("transnormer", 6_874_992_640)]
)
def test_sixteen_bytes_for_a_parameter(task: str, parameters: int) -> None:
    """Weights, gradients and Adam's moments in fp32: 110 GB of TransNormerLLM 7B."""
    alone = ("mesh.replica_size=1", "mesh.strategy=ddp")
    config = planner(f"task={task}", "scale=paper", *alone).config(32)
    held = holdings(train.APP.make_task(config), config, 32)
    memory = held.memory
    whole = memory.parameter_bytes + memory.gradient_bytes + memory.inner_state_bytes
    assert held.num_parameters == parameters
    assert whole == pytest.approx(16 * parameters, rel=1e-6)


def test_operations_of_gpt2() -> None:
    """6 N D leaves out attention, so that it is 20 % too low at most."""
    config = planner("task=gpt2", "scale=paper", "train.batch_size=1").config(1)
    assert parameters(config) == 124_475_904
    counted = flops(train.APP.make_task(config), config)
    assert 1.0 < counted / (6 * 124_475_904 * 1024) < 1.2


@pytest.fixture
def gpt2(root: Path, text: Path) -> tuple[str, ...]:
    """The task on a small text."""
    return "task=gpt2", f"data.root={root}", f"data.path={text}"


def test_computing_again_is_no_more_of_the_model(gpt2: tuple[str, ...]) -> None:
    words = (*gpt2, "train.batch_size=2")
    plain = planner(*words).need(planner(*words).config(1), 1)
    again = planner(*words, "train.checkpoint_activations=true")
    found = again.need(again.config(1), 1)
    assert found.flops == plain.flops
    assert found.num_bytes < plain.num_bytes
    # The forward pass of the blocks is a third of the computation, and they are most of the model.
    assert plain.again_flops == 0 and 0.15 < found.again_flops / found.flops <= 1 / 3
    took = [course(need, PLACE).compute_s for need in (plain, found)]
    assert took[1] / took[0] == pytest.approx(1 + found.again_flops / found.flops)
    assert "more again" in facts(found)["operations of a step"]


def test_a_batch_that_does_not_divide() -> None:
    words = planner("task=gpt2", "train.global_batch=48", "train.batch_size=4")
    assert [words.nearest(gpus) for gpus in (1, 2, 5, 6, 11, 12, 100)] == [1, 2, 4, 6, 6, 12, 12]
    says = r"^train\.global_batch=48: .*; or on 6 GPUs \(--nearest\)"
    with pytest.raises(ConfigError, match=says):
        words.fitting(8)
    with pytest.raises(ConfigError, match=r"^train\.global_batch=47"):
        planner("task=gpt2", "train.global_batch=47", "train.batch_size=4").nearest(8)


@pytest.mark.slow
def test_averaged_moments_of_7b_fit() -> None:
    """Seven copies of a model whose eight workers gather its blocks in bf16."""
    words = ("method=co2_keep", "co2_keep.average_moments=true")
    need = planner("task=transnormer", "scale=paper", *words).fitting(32)
    assert need.held.gathered_bytes == pytest.approx(2 * need.held.num_parameters, rel=0.05)


def test_launches_by_hand() -> None:
    """Of two linear layers, each multiplied forward and backward, but for the samples' gradient."""
    compiled, eager = (
        planner("task=toy", f"train.compile={value}").fitting(1).work for value in ("true", "false")
    )
    assert compiled is not None and compiled.launches == 5
    assert eager is not None and eager.launches > 3 * 5


def test_what_bounds_a_step() -> None:
    """Its computation at the MFU of its task, its launches, or what loads its pictures."""
    place = replace(PLACE, mfu=None)
    need = on_a_node("resnet50")
    found = course(need, place)
    assert found.mfu == 0.2 and found.compute_s == need.flops / 8 / (0.2 * 312e12)
    assert found.bound_by == "loading" and found.alone_s == 512 / (8 * 460)
    assert found.days == pytest.approx(512 / (8 * 460) * 5004 / 86_400), "no mean is waited for"
    told = dict(lines(need, place, found))
    assert told["loading of a step"].startswith("0.139 s: 512 samples of a worker")
    assert "2,470 pictures" in told["computation of a step"] and "2,470" not in str(facts(need))
    toy = planner("task=toy", "train.accumulate=2").fitting(1)
    found = course(toy, place)
    assert found.bound_by == "launches" and found.load_s == 0
    assert toy.work is not None
    assert found.alone_s == found.launch_s == pytest.approx(2 * toy.work.launches * 3.8e-6)


def test_what_saving_takes(gpt2: tuple[str, ...]) -> None:
    need = planner(*gpt2, "method=co2", "checkpoint.every_s=10").fitting(4)
    told, saved = facts(need), need.held.saved_bytes
    assert told["checkpoint"].endswith(f"every 10 s: {saved / 1e10:.2g} GB/s")
    assert told["host's memory"] == f"{saved / 4e9:,.4g} GB a worker: a copy of what it saves"


def test_messages_that_outgrow_gradients(gpt2: tuple[str, ...]) -> None:
    """Of very many replicas each gets a message, where an all-reduce takes two vectors at most."""
    words = planner(*gpt2, "method=sparseloco", "sparseloco.tau=1", "train.batch_size=1")
    assert "warning" not in facts(words.fitting(8))
    assert "times as much as allreduce" in facts(words.fitting(1024))["warning"]


PLANNED = [name for name, kind in train.APP.tasks.items() if hasattr(kind, "blank")]


@pytest.mark.parametrize("task", PLANNED)
def test_blank_batches_are_like_batches(task: str, tmp_path: Path, root: Path, text: Path) -> None:
    words = quick(task, root, text, tmp_path / "graph")
    config = configured(*words, "launch.workers=1", runs=tmp_path)
    made = train.APP.make_task(config)
    made.setup(1)
    blank, batch = made.blank(), next(iter(made.batches(Mesh.world(device="cpu"), 0)))
    if task == "graph":
        assert blank.keys() <= batch.keys()
        for name, tensor in blank.items():
            assert tensor.dtype == batch[name].dtype and tensor.dim() == batch[name].dim()
        starts = [name for name in blank if name.startswith("starts")]
        assert all(len(blank[name]) >= len(batch[name]) for name in starts)
        return
    tensors = [(one,) if isinstance(one, torch.Tensor) else one for one in (blank, batch)]
    for ours, theirs in zip(*tensors, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


WIDE = (*TOO_LARGE, "toy.hidden=40000")
LARGE_BATCH = ("task=vit", "scale=paper", "train.global_batch=16384", "train.batch_size=4096")


@pytest.mark.parametrize(
    ("words", "gpu", "advice"),
    [
        (WIDE, "v100-16g", "mesh.replica_size=4 mesh.strategy=zero2"),
        (LARGE_BATCH, "l4", "train.batch_size="),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    words: tuple[str, ...], gpu: str, advice: str
) -> None:
    with pytest.raises(ConfigError, match="needs more than the") as refused:
        planner(*words, gpu=gpu).fitting(4)
    assert advice in refused.value.hint
    settings = refused.value.hint.rpartition("this fits: ")[2].split()
    planner(*words, *settings, gpu=gpu).fitting(4)


def test_what_fits_is_not_refused() -> None:
    planner(*TOO_LARGE, gpu="v100-16g").fitting(4)


def test_the_smallest_number_that_holds_it() -> None:
    """With a part of its outer state on each of them, two hold what one does not."""
    words = (*TOO_LARGE, "method=co2", "co2.shard=true", "toy.features=30000")
    need = planner(*words, gpu="v100-16g").smallest()
    assert need.workers == 2
    assert planner(*TOO_LARGE).smallest().workers == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--gpu a100", "--gpu=a100: no GPU of the table; it has a100-40g, a100-80g"),
        ("--gpus none", "--gpus=none: must be a whole number"),
        ("--gpus 12", "--gpus=12: must fill servers of 8"),
        ("launch.workers=64 --gpus 2", "launch.workers=64: --gpus=2 differs"),
        ("launch.gpu=l4 --gpu h100", "launch.gpu=l4: --gpu=h100 differs"),
        ("method=torch_post_local_sgd --gpus 2", "method=torch_post_local_sgd"),
    ],
)
def test_refused(words: str, line: str) -> None:
    assert refused(train.APP.main, ["plan", "task=toy", *words.split()]).startswith(line)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.APP.main(["plan", "task=toy", "method=streaming_diloco", "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    assert "  740\n" in out and "not simulated: each fragment" in out


def test_one_replica_synchronizes_with_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task=toy", "mesh.replica_size=2", "mesh.strategy=zero1", "optim.name=adamw"]
    assert train.APP.main(["plan", *words, "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    assert "none: there is one replica" in out and "exposed" not in out


def test_the_page_of_all_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "TASKS", ("vit", "toy"))
    _, *words = WIDE
    words += ["scale=smoke", "--gpus", "4", "--gpu", "v100-16g"]
    assert recipe.main([*words, "--out", str(tmp_path / "plan.md")]) == 0
    page = capsys.readouterr().out
    assert (tmp_path / "plan.md").read_text() == page
    vit, toy = (line for line in page.splitlines() if line.startswith(("| vit", "| toy")))
    assert vit.startswith("| vit | toy.features=20000")
    assert page.endswith("- MFU of toy: " + paces.UNKNOWN.source + "\n"), "vit has no plan"
    assert toy.startswith("| toy mesh.replica_size=4 mesh.strategy=zero2")
    head = next(line for line in page.splitlines() if line.startswith("| task"))
    told = dict(zip(head.split(" | "), toy.split(" | "), strict=True))
    days = float(told["GPU-days"]) / int(told["GPUs"])
    assert float(told["days"]) == pytest.approx(days, rel=0.01)
    line = refused(recipe.main, ["--gpus", "none"])
    assert line.startswith("--gpus=none: must be a whole number")


def test_it_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    words = (*TOO_LARGE, "toy.hidden=400000", "launch.workers=2", "launch.backend=gloo")
    config = configured(*words, "scale=smoke", "launch.gpu=v100-16g", runs=tmp_path)
    train.APP.check_memory(config, list(words))  # smoke scale is checked nowhere
    config.scale = "gpu"
    with pytest.raises(ConfigError, match="needs more than the 16"):
        train.APP.check_memory(config, list(words))
    for scale in ("paper", "liu"):
        config.scale = scale
        with patch.object(Planner, "check") as checked:
            train.APP.check_memory(config, list(words))
        checked.assert_called_once_with(config, 2)
