"""Recipes of the laboratory: values of its tables and of runs, refusals, what is simulated."""

import json
import os
from pathlib import Path

import pytest

from co2.lab.training import TrialFailed
from co2.lab.trial import trial_folder
from co2.record.table import read_csv
from recipes import entries, figure1, laboratory, scaling, table3
from recipes.__main__ import main
from recipes.collect import collect
from recipes.laboratory import LabCell
from recipes.recipe import Recipe
from recipes.render import render
from tests.engine.test_timeline import event, mark

HEAD = "workers,mbit,method,repeat,throughput,exposed_share,overlap,steps,commit,hardware\n"
FEW = (
    "2,20,allreduce,0,800.0,0.9,0.0,60,abc1234,a cpu\n2,20,co2,0,10500.0,0.1,0.9,60,abc1234,a cpu\n"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The laboratory's table has two cells; the working folder is empty otherwise."""
    monkeypatch.chdir(tmp_path)
    Path("results/lab").mkdir(parents=True)
    Path("results/lab/cells.csv").write_text(HEAD + FEW)
    return tmp_path


def cell(recipe: Recipe, row: str, column: str, repeat: int) -> LabCell:
    found = recipe.cell(recipe.row(row), recipe.column(column), "smoke", repeat)
    assert isinstance(found, LabCell)
    return found


def write_run(of: LabCell, throughput: float) -> Path:
    """A training's folder, as the laboratory leaves it."""
    run = trial_folder(of.trial, laboratory.EVEN, of._runs)
    folder = run / "gpt2" / "tag" / of.trial.method / "seed0"
    folder.mkdir(parents=True)
    summary = {"throughput": throughput, "exposed_share": 0.5, "overlap": 0.5}
    (folder / "summary.json").write_text(json.dumps({**summary, "workers": 2, "steps": 60}))
    machine = {"cpu": "another cpu", "cores": 4, "gpus": []}
    manifest = {"git": {"commit": "f" * 40, "dirty": False}, "hardware": machine}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_values_are_of_the_laboratorys_table_and_of_runs(place: Path) -> None:
    second = cell(table3.RECIPE, "CO2", "2 workers, 20 Mbit/s", 1)
    folder = write_run(second, 10_700.0)
    assert collect([table3.RECIPE], place / "out", "smoke") == (3, 0)
    rows = read_csv(place / "out" / "ours.csv")
    assert [(r["row"], r["seed"], float(r["value"]), r["commit"], r["folder"]) for r in rows] == [
        ("AllReduce", "0", 800.0, "abc1234", "results/lab/cells.csv"),
        ("CO2", "0", 10_500.0, "abc1234", "results/lab/cells.csv"),
        ("CO2", "1", 10_700.0, "fffffff", str(folder.relative_to(place))),
    ]
    assert rows[2]["command"] == (
        "python -m co2.lab --workers=2 --mbit=20 --methods=co2 --repeats=2"
    )
    table = entries.measured(table3.RECIPE, rows, [], "smoke")
    assert table.rows[0][:4] == ("2 workers, 20 Mbit/s", "AllReduce", "800", "1")
    assert table.rows[5][:4] == ("2 workers, 20 Mbit/s", "CO2", "10,600 ± 141", "2")
    assert table.rows[1][2] == "not run" and not table.best


def test_cells_with_overrides_are_trainings_of_their_own(place: Path) -> None:
    kept = cell(table3.RECIPE, "CO2, kept progress", "2 workers, 20 Mbit/s", 0)
    traced = cell(figure1.RECIPE, "CO2", "overlap, %", 0)
    plain = cell(table3.RECIPE, "CO2", "2 workers, 100 Mbit/s", 0)
    assert kept.overrides == ("co2_keep.delay=3",) and traced.overrides == ("trace=true",)
    assert kept.config().method_config.delay == 3 and traced.config().trace
    assert traced.trial == plain.trial and not plain.config().trace
    write_run(plain, 1.0)
    assert plain.summary() is not None and traced.summary() is None and traced.folder() is None


def test_without_root_it_is_one_line_and_nothing_is_trained(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["run", "zero_one_adam", "figure1", "--seeds", "0"]) == 2
    error = capsys.readouterr().err
    assert "use sudo" in error and error.count("\n") == 1
    assert not Path("results/runs").exists()
    done = [cell(table3.RECIPE, "CO2", "2 workers, 20 Mbit/s", 0)]
    laboratory.check(done)
    assert laboratory.run(done) == [], "what has been measured needs nothing"


def test_a_failed_cell_does_not_lose_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (cell(table3.RECIPE, "CO2", f"{n} workers, 100 Mbit/s", 0) for n in (2, 4))

    def train(self: LabCell) -> None:
        if self == bad:
            raise TrialFailed("a worker ended")
        write_run(self, 2.0)

    monkeypatch.setattr(LabCell, "train", train)
    lines: list[str] = []
    assert laboratory.run([bad, good, good], lines.append) == [bad]
    assert good.summary() is not None and "failed: a worker ended" in lines
    assert laboratory.run([bad, good], lines.append) == [bad]
    assert lines[-2].startswith("1 of 1"), "what has finished is not measured again"


def test_figures_against_bandwidth_and_workers(place: Path) -> None:
    for workers, rate in ((2, "100"), (4, "20")):
        write_run(cell(table3.RECIPE, "CO2", table3.name(workers, rate), 0), 9000.0)
    collect([table3.RECIPE], place, "smoke")
    render([table3.RECIPE], place, "smoke")
    names = {path.name for path in (place / "figures").iterdir()}
    assert names == {
        "table3_2_workers.svg",
        "table3_4_workers.svg",
        "table3_links_of_20_mbit_s.svg",
        "table3_links_of_100_mbit_s.svg",
        "table3_simulated_80_gbit_s_tcp_ip.svg",
        "table3_simulated_800_gbit_s_rdma.svg",
    }
    drawn = (place / "figures" / "table3_links_of_20_mbit_s.svg").read_text()
    assert "AllReduce" in drawn and "SlowMo" not in drawn, "of what has run"


def test_simulated_is_beside_the_paper_and_not_among_the_measured() -> None:
    place = {"row": "CO2, τ = 48", "column": "80 Gbit/s TCP/IP, 128 GPUs"}
    paper = [{**place, "value": "304736", "spread": ""}]
    (table,) = scaling.tables([], paper)
    assert "Not measured" in table.text
    lines = {row[:3]: row[3:] for row in table.rows}
    tcp = "80 Gbit/s TCP/IP"
    assert lines[tcp, "CO2, τ = 48", "paper"] == (*["—"] * 4, "304,736", "—")
    assert (tcp, "AllReduce", "paper") not in lines
    fitted = lines[tcp, "AllReduce", "simulated, fitted"]
    assert [cell.endswith("†") for cell in fitted] == [1, 1, 0, 0, 1, 1]
    assert fitted[0] == "18,444†" and fitted[1] == "3,488†"
    nominal = lines["800 Gbit/s RDMA", "AllReduce", "simulated"]
    assert [cell.endswith("†") for cell in nominal] == [1, 0, 0, 0, 0, 0]
    for line in lines.values():
        eight_times, all_of_them = (line[at].strip("†").replace(",", "") for at in (1, 4))
        if "—" not in line:
            ratio = float(all_of_them) / (8 * float(eight_times))
            assert float(line[5].strip("†")) == pytest.approx(ratio, abs=0.006)
    measured = entries.measured(table3.RECIPE, [], paper, "smoke")
    assert not any("304" in cell for row in measured.rows for cell in row)


def test_the_timeline_is_drawn_from_traces_and_stays_where_there_are_none(place: Path) -> None:
    stem = place / "figures" / "figure1"
    assert list(figure1.draw([], stem)) == []
    for row in figure1.RECIPE.rows:
        folder = write_run(cell(figure1.RECIPE, row.name, "overlap, %", 0), 1.0)
        events = [event("aten::mm", 0, 0.4), mark("gloo:all_reduce", 0.3, 0.6, "float")]
        (folder / "trace").mkdir()
        (folder / "trace" / "rank_0.json").write_text(json.dumps({"traceEvents": events}))
    (path,) = figure1.draw([], stem)
    drawn = path.read_text()
    assert all(name in drawn for name in ("AllReduce", "Local SGD", "CO2", "stands still"))
    (place / "results" / "runs").rename(place / "gone")
    assert list(figure1.draw([], stem)) == [path] and path.read_text() == drawn
