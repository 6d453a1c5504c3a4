"""Equal tuning: every method gets the same number of trials, at the same lengths, on the same data.

python -m recipes tune TASK [METHOD…] [--trials 12] [--tau N] [--average-moments]
                       [--gap-penalty KIND] [--scale smoke]

For each method, AllReduce included: as many short trials as `--trials` says, of two fifths of the
steps; then the best two of them at the full number of steps, and a third: a step beyond the better
of the two where that has a number at the end of what was tried, else the third best. The best of
these wins. What counts is the validation loss on the tuning part of the data, with a seed that no
table uses. Methods take turns, in the same processes. After Ctrl-C the same command goes on; so it
does where the trials in results/tuning.csv were made elsewhere: what has ended with the same
settings, and with today's versions of the task's and the method's code, is not made again.

All trials go to results/tuning.csv, the winner to conf/tuned/<task>/<method>.yaml, which
`tuned=true` loads.

Cost: 12 trials of two fifths and 3 whole ones are 7.8 runs of a method on a task. The quarters of
before ended on RoBERTa's plateau and after 25 rounds of pictures: the best of 12 won in 31 of 74
searches (results/tables/tuning.md counts), on ADE20K in 1 of 8. In `rounds_trials` the rate that is
best after 25 rounds is best after 100 for none of five methods; that after 100, after 300 for all.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import yaml

from co2.app.tuned import GAP, MOMENTS
from co2.atomic import write_durably
from co2.config import Config, OptimConfig
from co2.errors import DIVERGED, nearest, require
from co2.methods import METHODS
from co2.record.provenance import require_clean
from co2.record.table import Table, read_csv
from recipes.runs import cells, fingerprints
from recipes.runs.cells import TrainCell, own_words
from recipes.runs.measured import NEWER, in_order
from recipes.tuning.proposals import AT_ONCE, Proposals
from recipes.tuning.spaces import Places, Space, Value, at_legal_end, in_steps, is_beyond
from recipes.tuning.tuning import TUNING, TUNING_SEED

SHARE = Fraction(2, 5)
"""Of the steps, in a short trial: at smoke scale whole rounds for τ of 12 and 48."""
FINALISTS = 3
UNTRIED, WIDENED = "Nothing was tried beyond the winner's ", "The grid was widened to the winner's "
"""What begins the lines of a tuned file that name settings at the border of what was tried: of the
first grid, or of a wider one."""
RUNS = "results/runs/tuning"
KEY = ("task", "method", "tau", "average_moments", "gap_penalty", "scale")
"""Columns of results/tuning.csv that tell one search from another."""
FIELDS = (
    *KEY,
    *("trial", "rung", "settings", "loss", "outcome", "seed", "commit", "hardware", "digest"),
    *NEWER,
)
"""Columns of results/tuning.csv. `rung` is the number of steps; a loss of inf is that of a trial
whose outcome is `diverged` or `failed`; `digest` is of all settings, as in results/runs.csv."""
Line = Mapping[str, str]
"""A line of results/tuning.csv."""


@dataclass(frozen=True)
class Trial:
    """One training of a search."""

    number: int
    """From 1; a finalist keeps the number of its short trial. One a step beyond the best has the
    number after all of theirs."""
    steps: int
    places: Places
    settings: Mapping[str, Value]
    """By full name, for this number of steps."""
    cell: TrainCell
    known: Line | None = None
    """Its line, if it had ended before, here or elsewhere."""

    @property
    def loss(self) -> float:
        """The final validation loss; infinite for a training that diverged or failed."""
        if self.known is not None:
            return float(self.known["loss"])
        summary = self.cell.summary()
        loss = None if summary is None else summary["final"]["loss"]
        return math.inf if loss is None else float(loss)

    def source(self) -> dict[str, str]:
        """Commit, hardware, torch's version and fingerprint; empty where the run failed before it
        had a folder."""
        source = self.known or (self.cell.source() if self.cell.begun() else {})
        return {name: source.get(name, "") for name in ("commit", "hardware", *NEWER)}


@dataclass
class Search:
    """The trials of one method on one task.

    Args:
        base: the task's and method's configuration as conf has it.
        own: what the comparison is about, by key of the method's node; the rest is conf's.
        lines_before: of results/tuning.csv.
    """

    base: Config
    own: Mapping[str, Value] = field(default_factory=dict)
    lines_before: Sequence[Line] = ()
    short: list[Trial] = field(default_factory=list)
    """A share of `SHARE` of the steps each."""
    whole: list[Trial] = field(default_factory=list)
    """The finalists, at the full number of steps."""
    statuses: dict[TrainCell, int] = field(default_factory=dict)
    """Exit statuses of the runs that failed."""

    def __post_init__(self) -> None:
        self.space = Space.of(self.base, MOMENTS in self.own)
        self.proposals = Proposals(self.space)
        ended = ("finished", "diverged")
        names = self.base.task, self.base.method
        own = [line for line in self.lines_before if self.is_own(line)]
        own = [line for line in own if fingerprints.is_current(line["fingerprint"], *names)]
        self.known = {line["digest"]: line for line in own if line["outcome"] in ended}

    def propose(self, count: int) -> list[Trial]:
        """The next short trials."""
        steps = max(1, int(self.base.train.steps * SHARE))
        first = len(self.short) + 1
        numbered = enumerate(self.proposals.ask(count), start=first)
        made = [self._trial(number, places, steps) for number, places in numbered]
        self.short += made
        return made

    def learn(self, made: Sequence[Trial]) -> None:
        """Take in the losses of short trials that have ended."""
        for trial in made:
            self.proposals.tell(trial.places, trial.loss)
        self.proposals.widen()

    def finalists(self) -> list[Trial]:
        """The best short trials, to be trained in full, but for the last; those without a loss are
        none."""
        self.whole = [self._in_full(trial) for trial in _ranked(self.short)[: FINALISTS - 1]]
        return self.whole

    def last(self) -> list[Trial]:
        """The last finalist, when the others have ended: a step beyond the best of them where it
        has a number at the end of what was tried, else the next of the short trials."""
        best = next(iter(_ranked(self.whole)), None)
        beyond = None if best is None else self.proposals.beyond(best.places)
        if beyond is not None:
            made = [self._trial(len(self.short) + 1, beyond, self.base.train.steps)]
        else:
            rest = _ranked(self.short)[FINALISTS - 1 : FINALISTS]
            made = [self._in_full(trial) for trial in rest]
        self.whole = [*self.whole, *made]
        return made

    def lines(self) -> Iterator[dict[str, object]]:
        """The lines of results/tuning.csv, of all trials that have ended."""
        for trial in (*self.short, *self.whole):
            words = [f"{name}={_text(value)}" for name, value in trial.settings.items()]
            place = {"trial": trial.number, "settings": " ".join(words)}
            if trial.known is not None:
                # In another search, with fewer knobs, the same trial may have had another number,
                # and fewer settings: others were conf's.
                yield {**trial.known, **place}
                continue
            status = self.statuses.get(trial.cell)
            if status is None and trial.cell.summary() is None:
                continue
            lost = "diverged" if status in (None, DIVERGED) else "failed"
            yield {
                **self.key(),
                **place,
                "rung": trial.steps,
                "loss": trial.loss,
                "outcome": "finished" if math.isfinite(trial.loss) else lost,
                "seed": TUNING_SEED,
                **trial.source(),
                "digest": trial.cell.digest,
            }

    def written(self) -> Iterator[Line]:
        """The lines as they are read again."""
        for line in self.lines():
            yield {name: str(line.get(name, "")) for name in FIELDS}

    def key(self) -> dict[str, str]:
        """What tells this search's lines from others'."""
        tau, config = self.tau(), self.base
        moments = "true" if MOMENTS in self.own else ""
        gap = str(self.own.get(GAP, ""))
        values = (config.task, config.method, "" if tau is None else str(tau), moments, gap)
        return dict(zip(KEY, (*values, config.scale), strict=True))

    def is_own(self, line: Line) -> bool:
        """Whether a line of results/tuning.csv is of this search."""
        return search_of(line) == tuple(self.key().values())

    def tau(self) -> object:
        """τ of the trials; None for a method without one."""
        return self.own.get("tau", getattr(self.base.method_config, "tau", None))

    def _in_full(self, short: Trial) -> Trial:
        return self._trial(short.number, short.places, self.base.train.steps)

    def _trial(self, number: int, places: Places, steps: int) -> Trial:
        config = self.base
        settings = self.space.words(places, steps, self.tau())
        words = [f"task={config.task}", f"scale={config.scale}", f"method={config.method}"]
        words += [f"{config.method}.{key}={_text(value)}" for key, value in self.own.items()]
        words += [f"{name}={_text(value)}" for name, value in settings.items()]
        words += [*schedule_words(config.optim, config.train.steps, steps), *TUNING]
        words += [f"train.seed={TUNING_SEED}", f"runs={RUNS}"]
        # Nothing is kept of a trial but its figures; stopped by Ctrl-C it saves nevertheless.
        words += ["log.wandb=disabled", "checkpoint.every=0"] if config.scale == "smoke" else []
        cell = TrainCell(own_words(words), ("tune",))
        known = self.known.get(cell.digest) if self.known else None
        return Trial(number, steps, places, settings, cell, known)


def _ranked(made: Sequence[Trial]) -> list[Trial]:
    """Those that ended with a loss, from the best to the worst."""
    ended = [trial for trial in made if math.isfinite(trial.loss)]
    return sorted(ended, key=lambda trial: trial.loss)


def schedule_words(optim: OptimConfig, full: int, steps: int) -> list[str]:
    """The overrides of a run of `steps` steps with the schedule of one of `full` steps: warm-up,
    milestones and stairs keep their share of it. Evaluated at its end only."""
    words = [f"train.steps={steps}", f"train.eval_every={steps}"]
    if steps == full:
        return words

    def shortened(number: int) -> int:
        return round(number * steps / full)

    words.append(f"optim.warmup_steps={shortened(optim.warmup_steps)}")
    if optim.milestones:
        words.append(f"optim.milestones=[{','.join(map(str, map(shortened, optim.milestones)))}]")
    if optim.decay_every is not None:
        words.append(f"optim.decay_every={max(1, shortened(optim.decay_every))}")
    return words


def tune_methods(
    task: str,
    methods: Sequence[str],
    trials: int,
    scale: str,
    tau: int | None,
    out: Path,
    moments: bool = False,
    gap: str | None = None,
    dirty: bool = True,
) -> int:
    """Tune these methods, by default all that the task can be trained with.

    Args:
        moments: whether the inner Adam's moments are averaged too, in methods that can.
        gap: the gap penalty of methods that have one; None: conf's.
        dirty: whether trials may be of code that no commit has.
    Returns:
        0, or 1 if no training of some method ended well.
    Raises:
        ConfigError: for what cannot be run, before anything is.
        SystemExit: after Ctrl-C; the same call goes on.
    """
    require(task in cells.APP.tasks, "task", task, nearest(task, cells.APP.tasks))
    require(trials >= 1, "--trials", trials, "must be 1 or more")
    require(tau is None or tau >= 1, "--tau", tau, "must be 1 or more steps")
    before = read(out / "tuning.csv")
    searches = [
        Search(config, _own(config, tau, moments, gap), before)
        for config in _configs(task, methods, scale, moments, gap)
    ]
    require_clean(dirty)
    for begin in range(0, trials, AT_ONCE):
        count = min(AT_ONCE, trials - begin)
        made = [search.propose(count) for search in searches]
        _train(searches, made, out)
        for search, own in zip(searches, made, strict=True):
            search.learn(own)
    _train(searches, [search.finalists() for search in searches], out)
    _train(searches, [search.last() for search in searches], out)
    record(searches, out / "tuning.csv")
    lost = [search for search in searches if not _conclude(search, trials)]
    return 1 if lost else 0


def _own(config: Config, tau: int | None, moments: bool, gap: str | None) -> dict[str, Value]:
    """What the command line says of this method, where it is not conf's."""
    found: dict[str, Value] = {MOMENTS: True} if moments else {}
    if gap is not None and gap != str(getattr(config.method_config, GAP)):
        found[GAP] = gap
    if tau is not None and hasattr(config.method_config, "tau"):
        found["tau"] = tau
    return found


def _configs(
    task: str, methods: Sequence[str], scale: str, moments: bool, gap: str | None
) -> Iterator[Config]:
    """The methods' configurations as conf has them. Raises `ConfigError` for a wrong name."""
    able = list(METHODS)
    for asked, key, option, lack in (
        (moments, MOMENTS, "--average-moments", "averages no moments"),
        (gap is not None, GAP, "--gap-penalty", "has no gap penalty"),
    ):
        having = [name for name in METHODS if hasattr(METHODS[name].Config, key)]
        for name in methods:
            require(name in METHODS, "method", name, nearest(name, METHODS))
            require(not asked or name in having, option, name, f"{lack}; {', '.join(having)} do")
        able = [name for name in able if not asked or name in having]
    for name in dict.fromkeys(methods or able):
        words = (f"task={task}", f"scale={scale}", f"method={name}")
        config = cells.composed_config(words)
        if gap is not None:
            cells.composed_config((*words, f"{name}.{GAP}={gap}"))
        inner = config.optim.name.value
        reason = METHODS[name](METHODS[name].Config()).refusals().get(f"optim.name={inner}")
        if reason is not None and not methods:
            print(f"{name} is left out: {task} trains with {inner}, and {reason}")
            continue
        yield config


def _train(searches: Sequence[Search], made: Sequence[Sequence[Trial]], out: Path) -> None:
    """Train what is missing of these trials, of all methods in turn, and record it."""
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*made))
    wanted = [trial.cell for trial in in_turn if trial is not None and trial.known is None]
    if not wanted:
        return
    for cell in wanted:
        cell.check()  # a search that is refused records nothing
    try:
        failed = cells.run(wanted)
        for search, own in zip(searches, made, strict=True):
            search.statuses |= {t.cell: failed[t.cell] for t in own if t.cell in failed}
    finally:
        record(searches, out / "tuning.csv")


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a tuning.csv, if there is one. A column that they lack is empty."""
    return [{name: line.get(name, "") for name in FIELDS} for line in read_csv(path)]


def search_of(line: Line) -> tuple[str, ...]:
    """What tells the search of a line from others."""
    return tuple(line.get(name, "") for name in KEY)


def record(searches: Sequence[Search], path: Path) -> None:
    """Write the searches' lines in place of their old ones; those of other searches stay. The file
    has one order, whichever search was the last."""
    lines: list[Mapping[str, object]] = [
        line for line in read(path) if not any(s.is_own(line) for s in searches)
    ]
    write([*lines, *(line for search in searches for line in search.lines())], path)


def write(lines: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write a tuning.csv of these lines."""
    Table.of_records(in_order(lines, (*KEY, "rung", "trial")), FIELDS).write_csv(path)


def rungs(search: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """The short trials of a search and its finalists, each from the best to the worst."""
    short = min((int(line["rung"]) for line in search), default=0)
    ranked = sorted(search, key=lambda line: float(line["loss"]))
    # A search that was stopped before its finalists has one rung.
    whole = [line for line in ranked if int(line["rung"]) > short]
    return [line for line in ranked if int(line["rung"]) == short], whole


def winner(search: Sequence[Line]) -> Line | None:
    """The best finalist; None where none has ended well."""
    best = next(iter(rungs(search)[1]), None)
    return best if best is not None and math.isfinite(float(best["loss"])) else None


def settings(line: Line) -> dict[str, Value]:
    """The settings of a trial, by full name."""
    words = (word.partition("=") for word in line["settings"].split())
    return {name: yaml.safe_load(value) for name, _, value in words}


def at_border(search: Sequence[Line], best: Line) -> list[str]:
    """Names of the winner's numbers beyond which nothing was tried, although it is legal."""
    tried, found = [_shares(line) for line in search], []
    for name, value in settings(best).items():
        numbers = [number for own in tried if isinstance(number := own[name], int | float)]
        if len(numbers) < len(tried):
            continue  # null, which all trials have
        at_end = _shares(best)[name] in (min(numbers), max(numbers))
        if at_end and not at_legal_end(best["method"], name, value, best["tau"]):
            found.append(name)
    return found


def _shares(line: Line) -> dict[str, Value]:
    """The settings of a trial, numbers of steps as shares of its own."""
    found = settings(line)
    for name, value in found.items():
        if in_steps(line["method"], name) and isinstance(value, int):
            found[name] = round(value / int(line["rung"]), 3)
    return found


def tuned_text(search: Sequence[Line]) -> tuple[Path, str]:
    """Where the settings of a search that has a winner are written, below conf, and the text.
    The one place that says what a tuned file holds."""
    best = winner(search)
    assert best is not None
    node = {key: best[key] for key in ("tau", MOMENTS, GAP) if best.get(key)}
    place = cells.tuned(best["task"], best["method"], best["scale"], node)
    border, trials = at_border(search, best), len(rungs(search)[0])
    followed = int(best["trial"]) > trials
    which = f"A step beyond {trials} trials" if followed else f"Trial {best['trial']} of {trials}"
    head = [
        f"Written by: python {place.command(trials)}",
        f"{which}, then best at the full {best['rung']} steps: a loss of "
        f"{float(best['loss']):.4f} on the tuning part of the data",
        f"with seed {best['seed']}. Commit {best['commit']}.",
        *([fingerprints.tuned_line(best["fingerprint"])] if best.get("fingerprint") else []),
    ]
    words = (f"{key}={best[key]}" for key in ("task", "method", "scale"))
    config = cells.composed_config(tuple(words))
    for told, wide in ((UNTRIED, False), (WIDENED, True)):
        own = [
            name
            for name in border
            if (followed or is_beyond(config, name, settings(best)[name])) is wide
        ]
        head += [f"{told}{', '.join(own)}."] if own else []
    nodes: dict[str, dict[str, Value]] = {}
    for name, value in settings(best).items():
        top, _, key = name.partition(".")
        nodes.setdefault(top, {})[key] = value
    comments = "".join(f"# {line}\n" for line in head)
    text = yaml.safe_dump(nodes, sort_keys=False)
    return place.file, f"# @package _global_\n{comments}{text}"


def write_winner(search: Sequence[Line]) -> None:
    """Write the tuned file of a search that has a winner."""
    path, text = tuned_text(search)
    path = cells.APP.conf / path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text)
    cells.composed_config.cache_clear()


def _conclude(search: Search, trials: int) -> bool:
    """Write the winner and say what it is. Returns whether there is one."""
    method, lines = search.base.method, list(search.written())
    best = winner(lines)
    if best is None:
        print(f"{method}: no training ended well, so nothing has won")
        return False
    write_winner(lines)
    border, first = at_border(lines, best), rungs(lines)[0][0]
    ends = f"; nothing was tried beyond its {', '.join(border)}" if border else ""
    rank = "also" if first["trial"] == best["trial"] else "not"
    said = f"loss {float(best['loss']):.4f} with {best['settings']}{ends}"
    print(f"{method}: {said}; it was {rank} the best short trial")
    return True


def _text(value: Value) -> str:
    """A value as on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
