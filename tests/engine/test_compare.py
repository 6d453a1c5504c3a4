"""Several runs side by side: equal bit for bit, or the first step that differs and by how much; and
their metrics as CSV, or drawn."""

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from co2.record import compare, curves
from tests.cli.harness import metrics, pooled
from tests.workers import Pool

LOSSES = (1.5, 1.25, 1.0, 0.75)


def write(folder: Path, losses: dict[int, float | None], kind: str = "train", **own: Any) -> Path:
    """A run's folder that has not finished."""
    folder.mkdir()
    values = {"task": "toy", "co2": {"tau": 3}, "runs": str(folder), **own}
    (folder / "config.yaml").write_text(json.dumps(values))
    lines = [{"kind": kind, "step": step, "loss": loss} for step, loss in losses.items()]
    lines.insert(1, {"kind": "notice", "step": 1, "text": "no figures"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def told(capsys: pytest.CaptureFixture[str], status: int, *words: object) -> list[str]:
    assert compare.main([str(word) for word in words]) == status
    found = capsys.readouterr()
    return (found.err if status == 2 else found.out).splitlines()


@pytest.fixture(scope="module")
def three(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of τ = 3, again 3, and 4."""
    words = ("method=co2", "train.steps=24", "train.eval_every=12", "log.every=2", "tag=one")
    folder = tmp_path_factory.mktemp("runs")
    return [
        pooled(workers, 2, *words, f"co2.tau={tau}", runs=folder / name).folder
        for name, tau in (("3", 3), ("same", 3), ("4", 4))
    ]


def test_real_runs(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = three
    lines = told(capsys, 0, one, same)
    assert lines[:2] == [f"A: {one}", f"B: {same}"]
    assert lines.count("Equal at all 12 common steps, bit for bit.") == 1
    assert lines.count("Equal at all 2 common steps, bit for bit.") == 1
    final = json.loads((one / "summary.json").read_text())["final"]["loss"]
    assert f"| final.loss | {final:.6g} | {final:.6g} | = |" in lines

    lines = told(capsys, 1, one, other)
    assert "| co2.tau | 3 | 4 |" in lines
    losses = [
        {line["step"]: line["loss"] for line in metrics(run, "train")} for run in (one, other)
    ]
    first = next(step for step in losses[0] if losses[0][step] != losses[1][step])
    a, b = (found[first] for found in losses)
    (verdict,) = (line for line in lines if " of 12 common steps differ." in line)
    assert f"The first is {first}: {a!r} and {b!r}, a difference of {abs(b - a):.3g}." in verdict
    assert f"| {first} | {a:.6f} | {b:.6f} | {b - a:+,.3g} |" in lines


def test_one_bit_of_one_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = dict(enumerate(LOSSES))
    other = {**one, 2: math.nextafter(1.0, 2.0)}
    runs = [write(tmp_path / name, losses) for name, losses in (("a", one), ("b", other))]
    lines = told(capsys, 1, *runs)
    assert (
        "1 of 4 common steps differ. The first is 2: 1.0 and 1.0000000000000002, a difference of "
        "2.22e-16. The largest difference is 2.22e-16, at step 2."
    ) in lines
    assert "| 2 | 1.000000 | 1.000000 | +2.22e-16 |" in lines
    assert "| 1 | 1.250000 | 1.250000 | = |" in lines
    assert "A has not finished. B has not finished." in lines
    assert told(capsys, 0, runs[0], runs[0])


def test_runs_that_have_told_other_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a loss that was not finite."""
    even = write(tmp_path / "even", {2: 1.0, 4: None, 6: 3.0}, own=True)
    all_steps = write(tmp_path / "all", {1: 5.0, 2: 1.0, 3: 5.0, 4: None, 5: 2.0})
    lines = told(capsys, 0, even, all_steps)
    assert "Equal at all 2 common steps, bit for bit." in lines and "| 4 | — | — | — |" in lines
    assert "| own | true | — |" in lines, "a setting that one of them does not know"
    finite = write(tmp_path / "finite", {4: 1.0})
    lines = told(capsys, 1, even, finite)
    assert "1 of 1 common steps differ. The first is 4: not finite and 1.0." in lines
    odd = write(tmp_path / "odd", {1: 5.0})
    assert "No step in common: A has 3, B has 1." in told(capsys, 1, even, odd)


def test_a_long_run_is_shown_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one: dict[int, float | None] = dict.fromkeys(range(1, 301), 1.0)
    runs = [
        write(tmp_path / name, losses)
        for name, losses in (("a", one), ("b", {**one, 52: 2.0, 53: 3.0}))
    ]

    def steps(lines: list[str]) -> list[int]:
        cells = (line.split(" | ")[0].lstrip("| ") for line in lines)
        return [int(cell) for cell in cells if cell.isdecimal()]

    lines = told(capsys, 1, *runs)
    assert len(steps(lines)) == 21 and {1, 52, 300} <= set(steps(lines))
    assert "21 of 300 steps; --all shows all." in lines
    assert steps(told(capsys, 1, *runs, "--all")) == list(one)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("config.yaml", "- 1\n", "it holds no settings"),
        ("metrics.jsonl", '{"kind": "train", "loss": 1}\n', "'step'"),
        ("summary.json", "{}", "'memory'"),
    ],
)
def test_a_damaged_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, why: str
) -> None:
    sound = write(tmp_path / "sound", {1: 1.0})
    run = write(tmp_path / "run", {1: 1.0})
    (run / name).write_text(text)
    (line,) = told(capsys, 2, sound, run)
    assert line.startswith(f"error: RUN={run}: {name} is damaged (") and why in line
    (run / "metrics.jsonl").unlink()
    (line,) = told(capsys, 2, run, sound)
    assert line.startswith(f"error: RUN={run}: has no metrics.jsonl")


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    for name in ("co2", "slowmo"):
        (tmp_path / name).mkdir()
    return [
        write(tmp_path / "co2" / "seed0", {10: 2.5, 20: None, 30: 1.5}),
        write(tmp_path / "slowmo" / "seed0", {10: 2.25, 30: 1.0}),
    ]


def fields(capsys: pytest.CaptureFixture[str], *words: object) -> list[list[str]]:
    """The fields of what is printed."""
    assert curves.main([str(word) for word in words]) == 0
    return list(csv.reader(io.StringIO(capsys.readouterr().out)))


def test_two_runs(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that was not finite and a step that a run has not recorded are empty."""
    assert fields(capsys, *two) == [
        ["step", "co2 train/loss", "slowmo train/loss"],
        ["10", "2.5", "2.25"],
        ["20", "", ""],
        ["30", "1.5", "1.0"],
    ]


def test_curves_of_real_runs(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    runs = [three[0], three[2]]
    head, *rows = fields(capsys, *runs)
    assert head == ["step", *(f"{run} {kind}/loss" for kind in ("train", "eval") for run in "34")]
    for at, (kind, run) in enumerate(((k, r) for k in ("train", "eval") for r in runs), 1):
        losses = {line["step"]: line["loss"] for line in metrics(run, kind)}
        assert {int(row[0]): float(row[at]) for row in rows if row[at]} == losses

    head, *rows = fields(capsys, runs[0], "--figure", "all")
    assert {"step", "train/loss", "eval/loss", "train/exposed_s", "eval/accuracy"} <= {*head}
    (last,) = [line for line in metrics(runs[0], "train") if line["step"] == 24]
    row = dict(zip(head, rows[-1], strict=True))
    assert row["step"] == "24" and float(row["train/lr"]) == last["lr"]
    assert row["train/bytes"] == str(last["bytes"])
    assert fields(capsys, runs[0], "--figure", "bytes", "eval/*")[0] == [
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

    assert fields(capsys, *two, "--plot", tmp_path / "new" / "loss.png") == []
    with Image.open(tmp_path / "new" / "loss.png") as picture:
        assert picture.format == "PNG" and picture.width == 750
    assert fields(capsys, *two, "--plot", tmp_path / "a.svg", "--out", tmp_path / "a.csv") == []
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.csv").read_text().startswith("step,co2 train/loss,")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--figure", "lsos"), "--figure=lsos: no run has recorded it; did you mean loss?"),
        (("--plot", "a.txt"), "--plot=a.txt: must end in .png or .svg"),
        (("--out", "co2/seed0/config.yaml/a.csv"), "file=co2/seed0/config.yaml: File exists"),
        (("co2/seed0",), "RUN=co2/seed0: is given twice"),
        (("co2",), "RUN=co2: has no config.yaml; give the folder of a run, such as …/seed0"),
        (("--plots", "a.png"), "unrecognized arguments: --plots"),
        (("none",), "RUN=none: has recorded no metrics yet"),
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
    write(tmp_path / "none", {})
    two = [] if words == ("none",) else two[:1]
    with pytest.raises(SystemExit, match="2"):  # the parser ends by itself
        sys.exit(curves.main([*map(str, two), *words]))
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {why}") and said.out == ""
