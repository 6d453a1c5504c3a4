"""Equal tuning: as many trials for every method, a grid that widens, and what winners are for."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import yaml

from co2.config import OptimConfig, Schedule
from co2.errors import DIVERGED, ConfigError
from co2.methods import METHODS
from co2.record.folder import run_folder
from co2.record.table import read_csv
from recipes.__main__ import main
from recipes.recipe import Column, Recipe, Row
from recipes.runs import cells
from recipes.runs.cells import TrainCell, composed_config
from recipes.studies import kept_progress
from recipes.tuning import tune
from recipes.tuning.proposals import AT_ONCE, Proposals
from recipes.tuning.spaces import HELD, KNOBS, RATE, Knob, Places, Space
from recipes.tuning.tune import FINALISTS, schedule_words, tune_methods
from tests.cli.harness import TOY
from tests.recipes.conftest import write_folder
from tests.recipes.trained import trained

Landscape = Callable[[TrainCell], float]
Search = Callable[..., list[TrainCell]]
"""Takes a landscape, methods and a number of trials, and returns the runs that were made."""


@pytest.fixture
def conf(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration folder of its own, and a working folder that is otherwise empty."""
    folder = place / "conf"
    shutil.copytree(cells.APP.conf, folder, ignore=shutil.ignore_patterns("toy"))
    shutil.copytree(cells.APP.conf / "task", folder / "task", dirs_exist_ok=True)
    monkeypatch.setattr(cells, "APP", dataclasses.replace(cells.APP, conf=folder))
    monkeypatch.setattr(tune, "TUNING", ())
    composed_config.cache_clear()
    yield folder
    composed_config.cache_clear()


def words_of(cell: TrainCell) -> dict[str, str]:
    return dict(word.split("=", 1) for word in cell.overrides)


class Trainer:
    """In place of `cells.run`: a run's loss is a function of its settings. Infinity diverges."""

    def __init__(self, landscape: Landscape, stop_at: int | None = None, version: int = 1) -> None:
        self.landscape, self.stop_at, self.version = landscape, stop_at, version
        self.trained: list[TrainCell] = []

    def __call__(self, wanted: Iterable[TrainCell]) -> dict[TrainCell, int]:
        failed = {}
        for cell in (cell for cell in wanted if cell.summary() is None):
            if len(self.trained) == self.stop_at:
                raise SystemExit(130)
            self.trained.append(cell)
            loss, fingerprint = self.landscape(cell), {"task": self.version, "method": 1}
            if not math.isfinite(loss):
                failed[cell] = DIVERGED
            summary = None if cell in failed else {"final": {"loss": loss}}
            write_folder(run_folder(cell.config()), summary, fingerprint=fingerprint)
        return failed


@pytest.fixture
def search(conf: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    """Tunes methods of the toy. A search that is stopped returns, too."""

    def made(
        landscape: Landscape,
        methods: list[str],
        trials: int,
        runs: str = "own",
        out: str = "results",
        **of_trainer: int,
    ) -> list[TrainCell]:
        trainer = Trainer(landscape, **of_trainer)
        monkeypatch.setattr(cells, "run", trainer)
        monkeypatch.setattr(tune, "RUNS", f"results/runs/{runs}")
        with contextlib.suppress(SystemExit):
            assert tune_methods("toy", methods, trials, "smoke", None, Path(out)) == 0
        return trainer.trained

    return made


def rate(cell: TrainCell) -> float:
    return float(words_of(cell)["optim.lr"])


def far_from(best: float) -> Landscape:
    """The loss grows with the distance, in doublings, from the best learning rate."""
    return lambda cell: 1 + abs(math.log2(rate(cell) / best))


def test_every_method_has_the_same_budget(search: Search) -> None:
    """As many short and whole trials, of settings that differ, conf's own first."""
    methods = ["allreduce", "slowmo", "co2_keep"]
    trained = search(far_from(0.1), methods, 6)
    lines = read_csv(Path("results/tuning.csv"))
    for method in methods:
        own = [line for line in lines if line["method"] == method]
        assert [line["rung"] for line in own] == ["24"] * 6 + ["60"] * FINALISTS
        assert len({line["settings"] for line in own[:6]}) == 6
        assert {line["seed"] for line in own} == {"1000"}
        assert own[0]["settings"].startswith("optim.lr=0.1"), "conf's own"
        short = sorted(own[:6], key=lambda line: float(line["loss"]))
        whole = {line["trial"] for line in own[6:]}
        assert whole > {line["trial"] for line in short[: FINALISTS - 1]}
        assert whole <= {"7", *(line["trial"] for line in short[:FINALISTS])}
    steps = [
        sum(int(words_of(cell)["train.steps"]) for cell in trained if f"={m}" in cell.command)
        for m in ("allreduce", "slowmo")
    ]
    assert steps[0] == steps[1] == 6 * 24 + 3 * 60
    order = [words_of(cell)["method"] for cell in trained]
    assert order[:6] == methods * 2, "in turn"


def test_the_grid_widens_while_the_best_sits_on_its_border(
    conf: Path, search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    """conf's rate is 0.1, the grid reaches to 0.4, and the best is above; then far above."""
    search(far_from(0.5657), ["allreduce"], 12)
    path = conf / "tuned" / "toy" / "allreduce.yaml"
    assert yaml.safe_load(path.read_text())["optim"]["lr"] == 0.566
    assert "beyond" not in path.read_text()
    capsys.readouterr()
    search(far_from(100), ["allreduce"], 4, "others")
    assert "# The grid was widened to the winner's optim.lr.\n" in path.read_text()
    assert "; nothing was tried beyond its optim.lr; it was" in capsys.readouterr().out
    head = path.read_text().splitlines()
    assert head[0] == "# @package _global_"
    assert head[1] == "# Written by: python -m recipes tune toy allreduce --trials 4"
    assert head[2].startswith("# A step beyond 4 trials, then best at the full 60 steps")


@pytest.mark.parametrize("wins", [True, False])
def test_the_last_finalist_is_a_step_beyond_a_best_at_an_end(
    conf: Path, search: Search, wins: bool
) -> None:
    """In place of the third best short trial; it wins or not, and then the end is none."""
    short: list[float] = []

    def landscape(cell: TrainCell) -> float:
        whole = words_of(cell)["train.steps"] == "60"
        if not whole:
            short.append(rate(cell))
        worse = whole and not wins and rate(cell) > max(short)
        return far_from(100)(cell) + worse

    made = search(landscape, ["local_sgd"], 5)
    assert len(made) == 5 + FINALISTS
    full = [rate(cell) for cell in made[5:]]
    assert full[:2] == sorted(short, reverse=True)[:2] and full[2] > max(short)
    text = (conf / "tuned" / "toy" / "local_sgd.yaml").read_text()
    assert ("The grid was widened" in text) == ("A step beyond 5 trials" in text) == wins
    assert "Nothing was tried" not in text
    assert yaml.safe_load(text)["optim"]["lr"] == (full[2] if wins else full[0])


def test_a_number_of_steps_at_an_end_is_one_in_full_too() -> None:
    """A tenth of the steps is beyond a twentieth, and a fifth beyond both."""

    def line(trial: int, rung: int, freeze: int, loss: float) -> dict[str, str]:
        words = f"optim.lr=0.{trial % 2}1 zero_one_adam.freeze_step={freeze}"
        key = {"method": "zero_one_adam", "tau": "", "settings": words}
        return key | {"trial": str(trial), "rung": str(rung), "loss": str(loss)}

    lines = [line(1, 24, 1, 2), line(2, 24, 2, 1), line(2, 60, 6, 1), line(1, 60, 3, 2)]
    name = "zero_one_adam.freeze_step"
    assert name in tune.at_border(lines, lines[2])
    assert name not in tune.at_border([*lines, line(3, 60, 12, 3)], lines[2])


@pytest.mark.parametrize(
    ("best", "said"),
    [(0.2, "Nothing was tried beyond"), (0.566, "The grid was widened to"), (0.1, "")],
)
def test_what_a_file_says_of_a_third_best_that_wins(conf: Path, best: float, said: str) -> None:
    """It may lie at an end, which no trial went beyond: of the first grid, which ends at 0.4, or
    of a wider one."""

    def line(trial: int, rung: int, rate: float, loss: float) -> dict[str, str]:
        known = {"task": "toy", "method": "local_sgd", "tau": "12", "scale": "smoke"}
        own = {"trial": trial, "rung": rung, "settings": f"optim.lr={rate}", "loss": loss}
        told = {name: str(value) for name, value in own.items()}
        return dict.fromkeys(tune.FIELDS, "") | known | told

    rates = {1: 0.15, 2: 0.05, 3: best}
    short = [line(trial, 24, rate, trial) for trial, rate in rates.items()]
    whole = [line(trial, 60, rate, -trial) for trial, rate in rates.items()]
    _, text = tune.tuned_text([*short, *whole])
    assert "# Trial 3 of 3, then best at the full 60 steps" in text
    lines = [one for one in text.splitlines() if "winner's" in one]
    assert lines == ([f"# {said} the winner's optim.lr."] if said else [])


def test_a_winner_at_the_border_of_a_wider_grid(conf: Path, search: Search) -> None:
    search(far_from(100), ["allreduce"], 12)
    text = (conf / "tuned" / "toy" / "allreduce.yaml").read_text()
    assert "# The grid was widened to the winner's optim.lr.\n" in text
    assert "Nothing was tried" not in text
    assert yaml.safe_load(text)["optim"]["lr"] > 0.4


def told(proposals: Proposals, count: int, loss: Callable[[Places], float]) -> list[Places]:
    """The next proposals, whose losses are then known."""
    made = proposals.ask(count)
    for places in made:
        proposals.tell(places, loss(places))
    proposals.widen()
    return made


def space_of(method: str) -> Space:
    return Space.of(composed_config(("task=toy", "scale=smoke", f"method={method}")))


def test_it_widens_on_that_side_alone_and_not_for_a_failure(conf: Path) -> None:
    for best, ends in ((8, (0, 9)), (0, (-1, 8)), (4, (0, 8)), (None, (0, 8))):
        proposals = Proposals(space_of("local_sgd"))
        told(proposals, 9, lambda p, best=best: math.inf if best is None else abs(p[RATE] - best))
        assert proposals.ends == {RATE: ends}


@pytest.mark.parametrize("method", ["co2", "slowmo", "co2_keep", "overlap_local_sgd"])
@pytest.mark.parametrize("further", [-3, 3], ids=["below", "above"])
def test_a_winner_beyond_every_grid_is_followed(conf: Path, method: str, further: int) -> None:
    """Up to half of a batch goes one step beyond what was tried, but never out of the legal range,
    whose end is no border."""
    space = space_of(method)
    best = {
        name: len(knob.values) - 1 + further if further > 0 else further
        for name, knob in space.knobs.items()
    }
    proposals, asked = Proposals(space), []
    for _ in range(12):
        asked += told(proposals, AT_ONCE, lambda p: sum((p[n] - best[n]) ** 2 for n in best))
    assert len({tuple(places.values()) for places in asked}) == len(asked)
    for name, knob in space.knobs.items():
        low, high = proposals.ends[name]
        values = [knob.at(place) for place in range(low, high + 1)]
        assert values == sorted(set(values)) and knob.low <= values[0] and values[-1] <= knob.high
        at_end = knob.low in values if further < 0 else knob.high in values
        assert at_end or (high > len(knob.values) - 1 if further > 0 else low < 0), name


def test_a_grid_goes_on_by_the_factor_of_its_last_step() -> None:
    """Towards a legal end the distance to it shrinks; the end is a value or is not reached."""
    share = Knob("share", (0.0, 0.5, 0.8, 0.9), high=1.0)
    assert [share.at(place) for place in (4, 5)] == [0.95, 0.975]
    assert not share.goes_beyond(0, -1) and share.goes_beyond(5, 1)
    free = Knob("free", (0.25, 0.5, 1.0))
    assert [free.at(place) for place in (-2, -1, 3, 4)] == [0.0625, 0.125, 2.0, 4.0]


def test_proposals_are_new_and_repeat(conf: Path) -> None:
    """The same losses lead to the same ones; where all were tried the grid grows on both sides."""
    seen = []
    for _ in range(2):
        proposals = Proposals(space_of("local_sgd"))
        asked = [told(proposals, 1, lambda p: abs(p[RATE] - 4))[0][RATE] for _ in range(13)]
        seen.append(asked)
    assert seen[0] == seen[1] and seen[0][0] == 4
    assert sorted(seen[0][:9]) == list(range(9)) and sorted(seen[0][9:11]) == [-1, 9]


def test_every_method_has_a_space_and_every_value_is_legal(conf: Path) -> None:
    """Also what comes when grids have widened three times."""
    assert KNOBS.keys() <= METHODS.keys()
    for method in METHODS:
        base = composed_config(("task=gpt2", "scale=smoke", f"method={method}"))
        space = Space.of(base)
        tau = getattr(base.method_config, "tau", None)
        for name, value in space.words(space.start, base.train.steps, tau).items():
            node = base.optim if name == RATE else base.method_config
            own = space.held.get(name, getattr(node, name.partition(".")[2]))
            assert value == own, f"{name} is conf's own"
        for key, value in HELD.get(method, {}).items():
            assert space.held[f"{method}.{key}"] == value
            dataclasses.replace(base.method_config, **{key: value})
        for name, knob in list(space.knobs.items())[1:]:
            proposals = Proposals(space)
            for side in (-1, 1) * 3:
                proposals._reach(name, proposals.ends[name][side > 0] + side)
            low, high = proposals.ends[name]
            for place in range(low, high + 1):
                chosen = space.words({**space.start, name: place}, 180, tau)[name]
                dataclasses.replace(base.method_config, **{knob.key: chosen})  # checks its range


WINNERS = sorted(Path("conf/tuned").glob("*/*.yaml"))


def test_no_winner_is_written_by_hand() -> None:
    """Each is, to the letter, what the lines of its search in results/tuning.csv lead to; and every
    search had as many trials."""
    searches: dict[tuple[str, ...], list[tune.Line]] = {}
    for line in tune.read(Path("results/tuning.csv")):
        searches.setdefault(tune.search_of(line), []).append(line)
    made = dict(tune.tuned_text(own) for own in searches.values())
    found = {path.relative_to("conf"): path.read_text() for path in WINNERS}
    other = {str(path) for path in made.keys() | found.keys() if made.get(path) != found.get(path)}
    assert other == set(), "tune these again, or write what won"
    assert {len(tune.rungs(own)[0]) for own in searches.values()} == {12}


@pytest.mark.parametrize("method", ["allreduce", "local_sgd"])
@pytest.mark.parametrize("task", kept_progress.RATE)
def test_the_rate_of_methods_without_momentum(task: str, method: str) -> None:
    """That `kept_progress` gives `co2_keep` without momentum is what won for these."""
    won = yaml.safe_load(Path(f"conf/tuned/{task}/{method}.yaml").read_text())["optim"]["lr"]
    assert won == float(kept_progress.RATE[task])


def test_short_trials_have_the_whole_schedule() -> None:
    assert schedule_words(OptimConfig(warmup_steps=60), 720, 180) == [
        *("train.steps=180", "train.eval_every=180", "optim.warmup_steps=15")
    ]
    stairs = OptimConfig(schedule=Schedule.step, milestones=(30, 60), warmup_steps=10)
    assert schedule_words(stairs, 90, 45)[2:] == [
        "optim.warmup_steps=5",
        "optim.milestones=[15,30]",
    ]
    falling = OptimConfig(schedule=Schedule.exponential, decay_every=8)
    assert schedule_words(falling, 90, 45)[3:] == ["optim.decay_every=4"]
    assert schedule_words(stairs, 90, 90) == ["train.steps=90", "train.eval_every=90"]


def test_a_search_that_was_stopped_goes_on(conf: Path, search: Search) -> None:
    """No run is made twice, except that one which diverged may be; the result is the same, also
    where only the lines of the trials are there, and no run."""

    def landscape(cell: TrainCell) -> float:
        return math.inf if rate(cell) > 0.3 else far_from(0.1)(cell)

    def made(runs: str, out: str, **more: int) -> list[TrainCell]:
        return search(landscape, ["co2", "local_sgd"], 8, runs, out, **more)

    whole, begun = made("whole", "whole"), made("stopped", "out", stop_at=11)
    recorded = len(read_csv(Path("out/tuning.csv")))
    ended = sum(math.isfinite(landscape(cell)) for cell in begun)
    assert len(begun) == 11 and recorded in (ended, ended + 1), "what has ended is recorded"
    shutil.copytree("out", "elsewhere")
    rest = made("stopped", "out")
    again = [cell for cell in rest if cell in begun]
    assert all(math.isinf(landscape(cell)) for cell in again)
    assert len(rest) + len(begun) - len(again) == len(whole)
    lines = read_csv(Path("out/tuning.csv"))
    assert lines == read_csv(Path("whole/tuning.csv"))
    assert len(made("elsewhere", "elsewhere")) == len(whole) - recorded
    assert lines == read_csv(Path("elsewhere/tuning.csv"))
    winner = conf / "tuned" / "toy" / "co2.yaml"
    text = winner.read_text()
    winner.unlink()
    assert made("elsewhere", "elsewhere", stop_at=0) == []
    assert winner.read_text() == text, "known trials choose the same winner"
    lost = [line for line in lines if line["outcome"] == "diverged"]
    assert lost and all(line["loss"] == "inf" and line["rung"] == "24" for line in lost)


def test_trials_of_a_search_with_fewer_knobs_are_taken(search: Search) -> None:
    """Those that had conf's value of a knob that is new; their lines have it from then on."""
    path, knob = Path("results/tuning.csv"), " co2_keep.fragments=12"
    search(far_from(0.1), ["co2_keep"], 6)
    text = path.read_text()
    assert knob in text
    path.write_text(text.replace(knob, ""))
    assert search(far_from(0.1), ["co2_keep"], 6, "other") == []
    assert path.read_text() == text


def test_trials_of_other_code_are_made_again(search: Search) -> None:
    for runs, (version, number) in enumerate(((0, 5), (1, 5), (1, 0))):
        trained = search(far_from(0.1), ["allreduce"], 2, str(runs), version=version)
        assert len(trained) == number
    told = {line["fingerprint"] for line in read_csv(Path("results/tuning.csv"))}
    assert told == {"task 1 method 1"}


def test_a_gap_penalty_is_tuned_apart(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's gap and ours are two rows."""
    monkeypatch.setattr(cells, "run", Trainer(lambda c: rate(c) * (1 + ("aware " in c.command))))
    for gap in ("", " --gap-penalty gap_aware", " --gap-penalty gap_aware_steady"):
        assert main(f"tune toy co2 --trials 2 --dirty{gap}".split()) == 0
    lines = read_csv(Path("results/tuning.csv"))
    assert [line["gap_penalty"] for line in lines] == [""] * 5 + ["gap_aware"] * 5
    path = conf / "tuned" / "toy" / "co2_gap_aware.yaml"
    assert "gap_penalty:" not in path.read_text()
    words = ("task=toy", "scale=smoke", "method=co2", "tuned=true")
    config = cells.APP.config((*words, "co2.gap_penalty=gap_aware"))
    assert config.optim.lr == yaml.safe_load(path.read_text())["optim"]["lr"]
    with pytest.raises(ConfigError, match="recipes tune toy co2 --gap-penalty none"):
        cells.APP.config((*words, "co2.gap_penalty=none"))


def test_a_whole_search_trains(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after the short trials; with the losses of the runs themselves."""
    calls: list[list[TrainCell]] = []

    def stopping(wanted: Iterable[TrainCell]) -> dict[TrainCell, int]:
        calls.append(list(wanted))
        if len(calls) == 2:
            raise SystemExit(130)
        return trained(calls[-1], tmp_path)[0]

    monkeypatch.setattr(cells, "run", stopping)
    words = ["tune", "toy", "co2", "--trials", "2", "--dirty"]
    with pytest.raises(SystemExit):
        main(words)
    made = {cell: run_folder(cell.config()) / "summary.json" for cell in calls[0]}
    times = {cell: path.stat().st_mtime_ns for cell, path in made.items()}
    assert len(times) == 2
    assert main(words) == 0
    assert times == {cell: path.stat().st_mtime_ns for cell, path in made.items()}
    lines = read_csv(Path("results/tuning.csv"))
    assert [line["rung"] for line in lines] == ["24"] * 2 + ["60"] * FINALISTS
    best = min(lines[2:], key=lambda line: float(line["loss"]))
    text = (conf / "tuned/toy/co2.yaml").read_text()
    assert f"Trial {best['trial']} of 2" in text and f"{float(best['loss']):.4f}" in text
    nodes = yaml.safe_load(text)
    flat = {f"{node}.{key}": value for node in nodes for key, value in nodes[node].items()}
    assert best["settings"] == " ".join(f"{name}={value}" for name, value in flat.items())


WINNER = "# @package _global_\noptim:\n  lr: 0.05\nco2:\n  outer_momentum: 0.4\n  outer_lr: 0.7\n"


@pytest.fixture
def winner(conf: Path) -> Path:
    """A file as `tune` writes it."""
    path = conf / "tuned" / "toy" / "co2.yaml"
    path.parent.mkdir()
    path.write_text(WINNER)
    return path


def test_tuned_settings_win_over_conf_and_lose_to_the_users(winner: Path) -> None:
    words = (*TOY, "method=co2", "tuned=true")
    config = cells.APP.config(words)
    assert (config.optim.lr, config.method_config.outer_momentum) == (0.05, 0.4)
    assert config.optim.momentum == 0.9 and config.method_config.tau == 12, "the rest is conf's"
    assert config.tag == "lr0.05-outer_lr0.7-outer_momentum0.4-tuned"
    own = cells.APP.config((*words, "co2.outer_momentum=0.1", "train.steps=9"))
    assert own.method_config.outer_momentum == 0.1 and own.method_config.outer_lr == 0.7
    assert own.tag == "lr0.05-outer_lr0.7-outer_momentum0.1-steps9-tuned"
    winner.write_text(WINNER.replace("0.4", "0.6"))
    assert "outer_momentum0.6" in cells.APP.config(words).tag, "another winner is another run"


def test_a_recipe_may_ask_for_tuned_settings(winner: Path) -> None:
    """Its commands tell them, so that values of another winner's runs are not taken for these."""
    column = Column("loss", ("task=toy",), "final.loss")
    rows = (Row("CO2", ("method=co2",)), Row("SlowMo", ("method=slowmo",)))
    recipe = Recipe("tuned", "Tuned", "", rows, (column,), tuned=True)
    cell = recipe.cell(rows[0], column, "smoke", 0)
    assert isinstance(cell, TrainCell) and cell.config().optim.lr == 0.05
    told = " tuned=true  # optim.lr=0.05 co2.outer_momentum=0.4 co2.outer_lr=0.7"
    assert cell.command.endswith(told)
    assert [row for row, *_ in recipe.cells("smoke", [0])] == [rows[0]], "SlowMo has to be tuned"
    assert recipe.undecided("smoke") == 1 and recipe.undecided("paper") == 0
    plain = recipe.cell(rows[0], column, "paper", 0)
    assert "tuned" not in plain.command, "larger scales have conf's settings"
