"""`train.global_batch`: the same training on any number of workers, or one line of refusal."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

import train
from co2.errors import REFUSED, ConfigError
from co2.record.folder import settings_digest, tag_from
from co2.start import placement
from tests.cli.harness import Run, configured, metrics, pooled, weights
from tests.cli.test_runs import without_batch_norm
from tests.workers import Pool

SHAPES = ((1, 8), (2, 8), (4, 8), (1, 4), (2, 16))
"""Workers and samples of a micro-batch: 4, 2, 1, 8 and 1 of these make the 32 of a step."""


def test_the_number_of_workers_changes_no_loss(workers: Pool, tmp_path: Path) -> None:
    """Over four epochs, of which 4 of 100 samples are left out each time."""

    def train(world: int, batch: int) -> Run:
        return pooled(
            workers,
            world,
            "method=allreduce",
            *("train.global_batch=32", f"train.batch_size={batch}", "toy.samples=100"),
            *("train.steps=12", "train.eval_every=1"),
            runs=tmp_path / f"{world}-{batch}",
            setup=without_batch_norm,
        )

    runs = {shape: train(*shape).folder for shape in SHAPES}
    told = {shape: metrics(folder, "eval") for shape, folder in runs.items()}
    losses = {shape: [line["loss"] for line in lines] for shape, lines in told.items()}
    first, *others = SHAPES
    assert len(losses[first]) == 12 and len(set(losses[first])) == 12
    for shape in others:
        assert losses[shape] == pytest.approx(losses[first], abs=1e-6), shape
        for name, value in weights(runs[first]).items():
            torch.testing.assert_close(weights(runs[shape])[name], value, rtol=1e-5, atol=1e-6)
    kept = [
        yaml.safe_load((folder / "config.yaml").read_text())["train"] for folder in runs.values()
    ]
    assert [one["accumulate"] for one in kept] == [4, 2, 1, 8, 1]
    assert {one["global_batch"] for one in kept} == {32}


@pytest.mark.parametrize(
    ("whole", "batch", "world", "use"),
    [
        (64, 12, 4, "use 48, 96 or 144, or train.batch_size=8"),
        (480, 12, 32, "use 384, 768 or 1152, or train.batch_size=5"),
        (8, 12, 4, "use 48, 96 or 144, or train.batch_size=2"),  # less than a micro-batch each
        (480, 5, 64, "use 320, 640 or 960, or train.global_batch=512 train.batch_size=4"),
        (3, 4, 8, "use 32, 64 or 96, or train.global_batch=8 train.batch_size=1"),
        (1000, 16, 6, "use 864, 960 or 1056, or train.global_batch=1002 train.batch_size=1"),
    ],
)
def test_what_does_not_divide_is_refused(
    tmp_path: Path, whole: int, batch: int, world: int, use: str
) -> None:
    words = (f"launch.workers={world}", f"train.batch_size={batch}")
    with pytest.raises(ConfigError) as caught:
        configured(*words, f"train.global_batch={whole}", runs=tmp_path)
    at_once = f"{batch * world} samples that {world} workers draw at once"
    each = f"(train.batch_size={batch} each)"
    line = f"train.global_batch={whole}: is no multiple of the {at_once} {each}; {use}"
    assert str(caught.value) == line
    sizes, _, other = use.removeprefix("use ").rpartition(", or ")
    for size in sizes.replace(" or ", ", ").split(", "):
        made = configured(*words, f"train.global_batch={size}", runs=tmp_path).train
        assert made.accumulate * batch * world == int(size)
    if "train.global_batch" not in other:
        other += f" train.global_batch={whole}"
    if not other.startswith("train.batch_size=1 ") and "batch_size=1" not in other:
        made = configured(*words, *other.split(), runs=tmp_path).train
        assert made.accumulate * made.batch_size * world == made.global_batch


def test_no_batch_is_named_twice(tmp_path: Path) -> None:
    words = ("launch.workers=2", "train.batch_size=8", "train.global_batch=33")
    with pytest.raises(ConfigError, match=r"; use 16, 32 or 48$"):
        configured(*words, runs=tmp_path)


def test_workers_that_share_a_replica_draw_their_own(tmp_path: Path) -> None:
    words = ("launch.workers=4", "mesh.replica_size=2", "train.global_batch=64")
    assert configured(*words, "train.batch_size=4", runs=tmp_path).train.accumulate == 4


def test_the_workers_of_torchrun_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    config = configured("train.global_batch=64", "train.batch_size=2", runs=tmp_path)
    assert config.train.accumulate == 4 and "workers8" in config.tag
    with pytest.raises(ConfigError, match=r"train\.global_batch=60: .* 16 samples that 8 workers"):
        configured("train.global_batch=60", "train.batch_size=2", runs=tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train.global_batch=32", "train.accumulate=2"),
            r"train\.accumulate=2: follows from train\.global_batch=32; give one of the two$",
        ),
        (
            ("train.global_batch=0",),
            r"train\.global_batch=0: must be a whole number, 1 or more, or null$",
        ),
        (
            ("train.keep_global_batch=true",),
            r"train\.keep_global_batch=True: has a new name: train\.global_batch",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*words, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_goes_on_with_its_global_batch(workers: Pool, tmp_path: Path) -> None:
    """An elastic one also with other workers, where it is rounded."""
    runs = tmp_path / "runs"
    words = ("tag=one", "method=co2", "co2.tau=2", "train.steps=4", "train.batch_size=8")
    whole = "train.global_batch=48"
    assert pooled(workers, 3, *words, whole, runs=runs).status == 0
    digests = set()
    for number, micro in ((2, 3), (3, 2), (4, 2), (8, 1)):
        more = ("launch.elastic=true", f"launch.workers={number}")
        config = configured(*words, whole, *more, runs=runs)
        assert config.train.accumulate == micro
        digests.add(settings_digest(config))
    assert len(digests) == 4, "they are other settings"
    with pytest.raises(ConfigError, match=r"train\.global_batch=48: is no multiple of the 32"):
        configured(*words, whole, "launch.workers=4", runs=runs)
    with pytest.raises(ConfigError, match=r"launch\.workers=2: .* a run with launch\.workers=3"):
        configured(*words, whole, "launch.workers=2", runs=runs)
    with pytest.raises(ConfigError, match=r"train\.global_batch=24: .* train\.global_batch=48"):
        configured(*words, "train.global_batch=24", "launch.workers=3", runs=runs)
    with pytest.raises(ConfigError, match=r"train\.global_batch=None: .* train\.global_batch=48"):
        configured(*words, "train.accumulate=2", "launch.workers=3", runs=runs)


def test_the_folder_of_an_earlier_version(
    workers: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, words = tmp_path / "runs", ("tag=one", "train.steps=2", "launch.workers=1")
    folder = pooled(workers, 1, *words, runs=runs).folder
    path = folder / "config.yaml"
    kept = yaml.safe_load(path.read_text())
    del kept["train"]["global_batch"]

    kept["train"]["keep_global_batch"] = False
    path.write_text(yaml.safe_dump(kept))
    configured(*words, runs=runs)
    assert train.APP.main(["export", str(folder), str(tmp_path / "out")]) == 0, capsys.readouterr()

    kept["train"]["keep_global_batch"] = True
    path.write_text(yaml.safe_dump(kept))
    with pytest.raises(ConfigError) as caught:
        configured(*words, runs=runs)
    assert "keep_global_batch=True, which is train.global_batch now" in str(caught.value)
    assert train.APP.main(["export", str(folder), str(tmp_path / "other")]) == REFUSED
    assert "train.global_batch" in capsys.readouterr().err


def test_workers_where_none_are_named(tmp_path: Path) -> None:
    with patch("torch.cuda.device_count", lambda: 4):
        assert placement.workers_here() == 4
    with patch("torch.cuda.device_count", lambda: 0):
        assert placement.workers_here() == 2
    with patch("co2.start.placement.workers_here", lambda: 4):
        config = configured("launch.workers=null", "train.global_batch=128", runs=tmp_path)
    assert config.launch.workers == 4 and config.train.accumulate == 2
    assert (
        config.tag == configured("launch.workers=4", "train.global_batch=128", runs=tmp_path).tag
    ), "the same run"
    assert tag_from((), 4, None, "co2") == "workers4"
