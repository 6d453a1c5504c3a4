"""The metrics of several runs side by side: as CSV, and drawn."""

import csv
import io
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from co2.record import curves
from tests.cli.harness import metrics, pooled
from tests.engine.test_compare import write
from tests.workers import Pool


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    for name in ("co2", "slowmo"):
        (tmp_path / name).mkdir()
    return [
        write(tmp_path / "co2" / "seed0", {10: 2.5, 20: None, 30: 1.5}),
        write(tmp_path / "slowmo" / "seed0", {10: 2.25, 30: 1.0}),
    ]


def told(capsys: pytest.CaptureFixture[str], *words: object) -> list[list[str]]:
    """The fields of what is printed."""
    assert curves.main([str(word) for word in words]) == 0
    return list(csv.reader(io.StringIO(capsys.readouterr().out)))


def test_two_runs(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that was not finite and a step that a run has not recorded are empty."""
    assert told(capsys, *two) == [
        ["step", "co2 train/loss", "slowmo train/loss"],
        ["10", "2.5", "2.25"],
        ["20", "", ""],
        ["30", "1.5", "1.0"],
    ]


def test_real_runs(workers: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("method=co2", "train.steps=24", "train.eval_every=12", "log.every=2")
    runs = [
        pooled(workers, 2, *words, f"co2.tau={tau}", "tag=one", runs=tmp_path / f"{tau}").folder
        for tau in (3, 4)
    ]
    head, *rows = told(capsys, *runs)
    assert head == ["step", *(f"{run} {kind}/loss" for kind in ("train", "eval") for run in "34")]
    for at, (kind, run) in enumerate(((k, r) for k in ("train", "eval") for r in runs), 1):
        losses = {line["step"]: line["loss"] for line in metrics(run, kind)}
        assert {int(row[0]): float(row[at]) for row in rows if row[at]} == losses

    head, *rows = told(capsys, runs[0], "--figure", "all")
    assert {"step", "train/loss", "eval/loss", "train/exposed_s", "eval/accuracy"} <= {*head}
    (last,) = [line for line in metrics(runs[0], "train") if line["step"] == 24]
    row = dict(zip(head, rows[-1], strict=True))
    assert row["step"] == "24" and float(row["train/lr"]) == last["lr"]
    assert row["train/bytes"] == str(last["bytes"])
    assert told(capsys, runs[0], "--figure", "bytes", "eval/*")[0] == [
        *("step", "train/bytes"),
        *(name for name in head if name.startswith("eval/")),
    ]


def test_a_plot(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = curves.drawn(curves.read(two))
    assert isinstance(drawn, Figure)
    (axis,) = drawn.axes
    assert [line.get_xydata()[-1].tolist() for line in axis.get_lines()] == [[30, 1.5], [30, 1.0]]
    assert axis.get_ylabel() == "train/loss (nats)" and axis.get_xlabel() == "steps"
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["co2", "slowmo"]

    assert told(capsys, *two, "--plot", tmp_path / "new" / "loss.png") == []
    with Image.open(tmp_path / "new" / "loss.png") as picture:
        assert picture.format == "PNG" and picture.width == 750
    assert told(capsys, *two, "--plot", tmp_path / "a.svg", "--out", tmp_path / "a.csv") == []
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.csv").read_text().startswith("step,co2 train/loss,")


def test_panels_of_several_figures(tmp_path: Path) -> None:
    """The fourth begins a second row, whose other panels are empty."""
    series = {f"train/{name}": {"": {1: 1.0}} for name in "abcd"}
    drawn = curves.drawn(series)
    assert [axis.axison for axis in drawn.axes] == [True] * 4 + [False] * 2
    assert drawn.legends == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--figure", "lsos"), "--figure=lsos: no run has recorded it; did you mean loss?"),
        (("--figure", "eval/loss"), "--figure=eval/loss: no run has recorded it; did you mean tr"),
        (("--plot", "a.txt"), "--plot=a.txt: must end in .png or .svg"),
        (("--out", "co2/seed0/config.yaml/a.csv"), "file=co2/seed0/config.yaml: File exists"),
        (("--plot", "co2/seed0/config.yaml/a.png"), "file=co2/seed0/config.yaml: File exists"),
        (("co2/seed0",), "RUN=co2/seed0: is given twice"),
        (("co2",), "RUN=co2: has no config.yaml; give the folder of a run, such as …/seed0"),
        (("--plots", "a.png"), "unrecognized arguments: --plots"),
    ],
)
def test_bad_input_is_one_line(
    two: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):  # the parser ends by itself
        sys.exit(curves.main([str(two[0]), *words]))
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {why}") and said.out == ""


def test_a_run_without_metrics_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", {})
    assert curves.main([str(run)]) == 2
    assert capsys.readouterr().err == f"error: RUN={run}: has recorded no metrics yet\n"


def test_csv_needs_no_matplotlib(
    two: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it, `program.run` says so of a plot."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert len(told(capsys, *two)) == 4
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        curves.main([str(two[0]), "--plot", "a.png"])


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        (
            ["r/gpt2/co2/tau12/seed0", "r/gpt2/slowmo/default/seed0"],
            ["co2/tau12", "slowmo/default"],
        ),
        (["r/a/seed0", "r/a/seed1"], ["seed0", "seed1"]),
        (["r/a", "r/a/b"], ["a", "a/b"]),
        (["r/gpt2/co2/tau12/seed0"], [""]),
    ],
)
def test_names(runs: list[str], found: list[str]) -> None:
    assert curves.names([Path(run) for run in runs]) == found
