"""What a method declares is what it does: the facts of the catalogue and of docs/methods.md, and
what it refuses, in one line: ways to travel, and inner optimizers. A method is covered by being in
the registry; the limits of its settings are in tests/engine/test_limits.py."""

import dataclasses
import re
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import co2
from benchmarks import method_pictures as pictures
from benchmarks.method_pictures import DRAWN, FRAGMENTED
from co2.catalogue import CATALOGUE
from co2.config import Blocking, CommConfig, CommDevice, Precision
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.base import BF16, ELASTIC, HOST
from recipes.tables import declared
from tests.cli.harness import ROOT
from tests.grids import OF_A_KIND, grid, nonempty
from tests.methods import problem
from tests.methods.driver import (
    ADAM,
    FP32_ONLY,
    MOMENTS,
    NEEDS_SGD,
    SETTINGS,
    SHARDED,
    Case,
    Snapshot,
    inner,
    trajectory,
)
from tests.workers import Pool, replicas

DOCS = ROOT / "docs"
TAU, ROUNDS = 3, 4
PAGE = (DOCS / "methods.md").read_text()
CARDS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |^<!--|\Z)", PAGE, re.M | re.S))
ROWS = {
    name: facts
    for name, *facts in re.findall(
        r"^\| \[`(\w+)`\]\(#\1\) \|[^|]*\| ([^|]*) \| ([^|]*) \| ([^|]*) \|", PAGE, re.M
    )
}
"""Method → the table's entries about what it sends, waits for and holds."""
REFUSED = dict(re.findall(r"^\| (`[a-z]+\.\w+=\w+`)(?:, zero3)? \| ([^|]*) \|$", PAGE, re.M))
"""Setting → the table's entry of methods that refuse it."""
WAITS = {
    Blocking.always: r"always\b",
    Blocking.beyond_delay: r"beyond (a round|a step|`delay` steps)$",
}
"""What a method waits for → the table's entry."""
OWN: dict[str, dict[str, int]] = {
    "allreduce": {},
    "acco": {},
    "sparta": {},
    "demo": {},
    "desloc": {"tau": 1, "first_moment_every": 3, "second_moment_every": 6},
    "mt_dao": {"tau": 1, "first_moment_every": 1, "second_moment_every": 1},
    "onebit_adam": {"freeze_step": ROUNDS},
    "zero_one_adam": {"freeze_step": ROUNDS, "max_interval": 1},
}
"""Settings of the methods without a τ, and of those whose periods must fit into the test."""


def test_every_method_has_one() -> None:
    assert CARDS.keys() == ROWS.keys() == METHODS.keys()
    for name, card in CARDS.items():
        assert f"(../co2/methods/{name}.py)" in card


@pytest.mark.parametrize("name", METHODS)
def test_the_catalogue_says_what_the_class_does(name: str) -> None:
    entry, keys = CATALOGUE[name], METHODS[name].Config.__dataclass_fields__
    assert entry.rounds == ("tau" in keys)
    assert entry.average_moments == ("average_moments" in keys)
    assert entry.fragments == ("fragments" in keys)
    assert entry.elastic == (ELASTIC not in METHODS[name]().refusals())


SHARED = "tau=12 comm_share=0.1 tau_power=0.0 blocking_share=0.0 average_moments=False"
DEFAULTS = {
    "local_sgd": "",
    "cocod_sgd": "",
    "slowmo": "outer_lr=1.0 outer_momentum=0.5",
    "diloco": "outer_lr=0.7 outer_momentum=0.9",
    "noloco": "outer_lr=0.7 outer_momentum=0.5 pull=0.7",
    "overlap_local_sgd": "pull=0.6 outer_momentum=0.7",
    "streaming_diloco": "fragments=2 delay=1 mixing=0.5 exchange=full outer_lr=0.7 "
    "outer_momentum=0.9",
    "eager_diloco": "outer_lr=0.7 outer_momentum=0.9",
    "sparseloco": "density=0.02 outer_lr=1.0 error_decay=0.95",
    "co2": "outer_lr=1.0 outer_momentum=0.2 gap_penalty=gap_aware_steady clip=None clip_mode=value "
    "shard=False",
    "co2_keep": "fragments=12 delay=None keep_local=0.5 outer_momentum=0.9 momentum_weight=0.1",
    "co2_released": "tau=48 outer_lr=1.0 outer_momentum=0.5 gap_penalty=1.0",
    "sparta": "share=0.005 delay=0",
    "desloc": "first_moment_every=36 second_moment_every=72",
    "mt_dao": "slow_beta=0.995 slow_weight=0.7 first_moment_every=12 second_moment_every=12 "
    "late_momentum=False",
    "demo": "decay=0.999 top_k=32 block=64",
    "onebit_adam": "freeze_step=100 compress=momentum mask_below=0.01",
    "zero_one_adam": "freeze_step=100 compress=momentum mask_below=0.01 kappa=16 double_every=None "
    "max_interval=16",
}
"""What a command that names no setting means, in papers' numbers and tables of ours: typed, so that
none changes by mistake."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    config = METHODS[name].Config()
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    words = {f"{key}={getattr(value, 'value', value)}" for key, value in found.items()}
    assert words >= {*DEFAULTS[name].split()}
    assert words <= {*DEFAULTS[name].split(), *SHARED.split()}


def vectors(name: str) -> float:
    """Averaged in a round."""
    return 1 + sum(1 / period for period in CATALOGUE[name].further)


@pytest.mark.parametrize("name", METHODS)
def test_the_pages_say_what_the_catalogue_does(name: str) -> None:
    entry, (sends, waits, copies) = CATALOGUE[name], ROWS[name]
    assert re.match(WAITS[entry.blocking], waits)
    assert copies == f"{entry.copies:g}".replace(".25", "¼") + " + 1/G" * entry.cut_copies
    assert re.search(r"^(Copies: |DDP's buckets)", CARDS[name], re.M)
    of_all = {"mean": f"{2 * vectors(name):g}(G−1)/G", "gather": "(G−1)", "pairs": "2⌊G/2⌋/G"}
    under = "τ" if entry.rounds else ""
    if entry.share < 1:
        under = f"({1 / entry.share:.0f}τ)" if entry.rounds else f"{1 / entry.share:.0f}"
    assert sends == f"{of_all[entry.exchange]} · n/{under}".rstrip("/")


def test_the_tables_are_made_of_what_methods_declare() -> None:
    for made in (declared.methods(), declared.refusals(), declared.shared()):
        assert f"{made.markdown()}\n<!-- results: end -->" in PAGE, "python -m recipes render"


@pytest.mark.parametrize("setting", nonempty(REFUSED))
def test_a_setting_is_refused_by_those_of_the_page(setting: str) -> None:
    """And by no other, at its default settings."""
    key, _, value = setting.strip("`").partition("=")
    refusing = set()
    for name, method in METHODS.items():
        try:
            method().refuse(key, value)
        except ConfigError:
            refusing.add(name)
    assert {*re.findall(r"`(\w+)`", REFUSED[setting])} - {"average_moments"} == refusing


def test_elastic_runs_refuse_what_the_page_says() -> None:
    _, _, limits = (DOCS / "elastic.md").read_text().partition("## Limits")
    [refused] = re.findall(r"^- Refused: (.*?)`co2\.shard", limits, re.M | re.S)
    elastic = {name for name, entry in CATALOGUE.items() if entry.elastic}
    assert {*re.findall(r"`(\w+)`", refused)} == METHODS.keys() - elastic


def measured(rank: int, world: int, name: str) -> tuple[float, float, int]:
    """Copies, bytes sent per step, and bytes of the model."""
    torch.manual_seed(0)
    # So large that the scales of 1-bit messages do not count.
    net = nn.Sequential(nn.Linear(150, 300), nn.Linear(300, 150))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    if name in NEEDS_SGD:  # its blocks fill 64 rows and 64 columns
        net = nn.Sequential(nn.Linear(150, 128), nn.Linear(128, 192, bias=False))
        optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    method = METHODS[name](METHODS[name].Config(**OWN.get(name, {"tau": TAU})))
    model = method.prepare(net, optimizer, co2.Mesh.world())
    before = 0.0
    for step in range(ROUNDS + ROUNDS * TAU):
        if step == ROUNDS:
            before = method.stats().bytes_sent
        model(torch.randn(4, 150)).sum().backward()
        method.step()
        optimizer.zero_grad()
    method.flush()
    size = method.copy_bytes
    return method.extra_copies, (method.stats().bytes_sent - before) / (ROUNDS * TAU), size


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world", grid([2, 3], (3).__eq__))  # of two, 2(G−1)/G is G−1
def test_the_numbers_are_the_codes_own(workers: Pool, name: str, world: int) -> None:
    entry = CATALOGUE[name]
    expected = entry.copies + entry.cut_copies / world
    expected += (world + 1) / 85 if name in NEEDS_SGD else 0  # messages
    helds, sents, (size, *_) = zip(*workers.run(measured, world, name), strict=True)
    assert helds == pytest.approx([expected] * world, rel=0.02)
    of_all = {
        "mean": 2 * vectors(name) * (world - 1) / world,
        "gather": world - 1,
        "pairs": 2 * (world // 2) / world,
    }
    sent = of_all[entry.exchange] * entry.share * size
    if entry.rounds:
        sent /= OWN.get(name, {}).get("tau", TAU)
    # On average: under noloco one of three replicas sends nothing in each round.
    assert sum(sents) / world == pytest.approx(sent, rel=0.01)


def test_pictures_are_what_the_simulator_shows() -> None:
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == set(DRAWN)
    for name in DRAWN:
        assert f"(pictures/{name}.svg)" in CARDS[name.removesuffix(FRAGMENTED)]
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == pictures.picture(name), name


SEEN = 2.0
"""Pixels between two curves that a reader can see."""


def shapes(name: str) -> tuple[str, list[list[float]]]:
    """What a picture draws without a word: everything but the curves, and the heights of these from
    left to right."""
    text = (DOCS / "pictures" / f"{name}.svg").read_text()
    text = re.sub(r"<(text|style)\b.*?</\1>|<svg[^>]*>", "", text)
    curves = re.findall(r'<polyline class="path"[^>]* points="([^"]*)"', text)
    heights = [[float(place.split(",")[1]) for place in curve.split()] for curve in curves]
    return re.sub(r'<polyline class="path".*?/>', "", text), heights


@pytest.mark.parametrize(("one", "other"), list(combinations(DRAWN, 2)))
def test_no_two_pictures_draw_the_same(one: str, other: str) -> None:
    (lanes, curves), (other_lanes, other_curves) = shapes(one), shapes(other)
    if lanes == other_lanes:
        pairs = zip(chain(*curves), chain(*other_curves), strict=True)
        assert max(abs(a - b) for a, b in pairs) > SEEN


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_shows_what_is_declared(name: str) -> None:
    method = name.removesuffix(FRAGMENTED)
    course, words, entry = pictures.course_of(name), pictures.card(name), CATALOGUE[method]
    bars = [span for span in course.spans if span.lane == course.workers]
    sent = {bar.kind for bar in bars}
    assert pictures.SENT[words.sends][0] in sent
    if METHODS[method].averages_gradients:
        assert sent == {pictures.GRADIENTS}
    computing = [span for span in course.spans if span.kind == "compute"]
    if entry.blocking is Blocking.always or getattr(METHODS[method].Config(), "delay", 1) == 0:
        assert any(span.kind == "wait" for span in course.spans)
        assert max(at - over for over, at, _ in course.taken) == pytest.approx(0, abs=1e-9)
    else:
        assert any(c.begin < b.end - 0.5 and b.begin + 0.5 < c.end for c in computing for b in bars)
    alike = len({str(path) for path in pictures.weights(name, course)}) == 1
    assert alike != words.local, "where all replicas are alike, weights move with a mean only"


# Refusals.

WIRES = {
    BF16: CommConfig(dtype=Precision.bf16),
    HOST: CommConfig(device=CommDevice.cpu),
}
BETWEEN: list[tuple[str, str, Any, Any]] = [
    ("co2_keep", "delay", 3, 4),
    ("co2_keep", "fragments", 3, 4),
    ("streaming_diloco", "fragments", 3, 4),
    ("streaming_diloco", "delay", 2, 3),
    ("noloco", "pull", 1.49, 1.5),  # β = 0.5: γ < 1.5
    ("mt_dao", "first_moment_every", 6, 7),  # with a late momentum, a multiple of τ
]
"""Limits that depend on other settings: the last value that is accepted, and one that is not."""


@pytest.mark.parametrize(("name", "key", "accepted", "refused"), BETWEEN)
def test_a_setting_keeps_its_limits_beside_others(
    name: str, key: str, accepted: Any, refused: Any
) -> None:
    settings = {**SETTINGS[name], **({"late_momentum": True} if name == "mt_dao" else {})}
    METHODS[name].Config(**{**settings, key: accepted})
    with pytest.raises(ConfigError, match=rf"^{key}={refused}: must be [^\n]*$"):
        METHODS[name].Config(**{**settings, key: refused})


REFUSING = {
    BF16: {*FP32_ONLY, *ADAM, *NEEDS_SGD, "co2 in parts", "int4"},
    HOST: {*ADAM, *NEEDS_SGD, "sparta", "acco", "allreduce", "co2 in parts"},
}
"""How collectives travel, and what cannot take it."""
TRAVELLING: dict[str, Case] = {
    **{name: (name, settings) for name, settings in SETTINGS.items()},
    "co2 in parts": SHARDED[0],
    "int4": ("streaming_diloco", {**SETTINGS["streaming_diloco"], "exchange": "int4"}),
}


@pytest.mark.parametrize("kind", TRAVELLING)
@pytest.mark.parametrize("wire", REFUSING)
def test_a_way_to_travel_is_refused_or_taken(kind: str, wire: str) -> None:
    name, settings = TRAVELLING[kind]
    if kind not in REFUSING[wire]:
        METHODS[name](METHODS[name].Config(**settings), WIRES[wire])
        return
    with pytest.raises(ConfigError, match=rf"^{wire}: method={name}: .*; use "):
        METHODS[name](METHODS[name].Config(**settings), WIRES[wire])


def moved(one: Snapshot, other: Snapshot) -> float:
    """Distance between two states of the trained weights."""
    names = ("enter.weight", "middle.weight", "leave.weight", "leave.bias")
    return sum((one[name] - other[name]).square().sum().item() for name in names) ** 0.5


@replicas()
@pytest.mark.parametrize("world", grid([1, 3], (3).__eq__))
@pytest.mark.parametrize(
    "name",
    grid([name for name in SETTINGS if name not in REFUSING[BF16]], OF_A_KIND.__contains__),
)
def test_over_bf16_the_trajectory_stays_close(rank: int, world: int, name: str) -> None:
    """Every displacement is off by at most 2^-8 of itself for each of the G roundings, and what it
    moves passes that on: together less than 3 % of the way made."""
    start = problem.snapshot(problem.build(0, inner(name), torch.float32)[0])
    arguments = (rank, world, name, SETTINGS[name], inner(name), torch.float32)
    plain, rounded = (trajectory(*arguments, comm=comm)[-1] for comm in (None, WIRES[BF16]))
    assert moved(plain, rounded) < 0.03 * moved(plain, start)
    same = world == 1 and name == "allreduce"  # alone, DDP sends nothing
    assert (moved(plain, rounded) == 0) == same


ADAMS = {"adam", "adamw"}
TAKES: dict[str, set[str]] = {
    **dict.fromkeys(ADAM, ADAMS),
    **{name: {"plain", "decay"} for name in NEEDS_SGD},
    "desloc": {*ADAMS, "maximize"},
    "mt_dao": {"adamw"},  # its own gradient is the one that Adam has seen, without weight decay
}
"""The inner optimizers that a method takes, where it does not take all."""
KINDS: dict[str, Any] = {
    **problem.OPTIMIZERS,
    "amsgrad": lambda groups: AdamW(groups, amsgrad=True),
    "maximize": lambda groups: AdamW(groups, maximize=True),
    "ascending": lambda groups: SGD(groups, lr=0.1, maximize=True),
}


@pytest.mark.parametrize("case", [*SETTINGS.items(), *MOMENTS.items()], ids=str)
def test_an_inner_optimizer_is_refused_or_taken(case: Case) -> None:
    name, settings = case
    takes = TAKES.get(name, set(KINDS))
    if "average_moments" in settings:
        takes = {*ADAMS, "maximize"}
    for kind, make in KINDS.items():
        net, _ = problem.build(0, "plain")
        optimizer = make([param for param in net.parameters() if param.requires_grad])
        method = METHODS[name](METHODS[name].Config(**settings))
        if kind in takes:
            method.prepare(net, optimizer, co2.Mesh.world())
            continue
        with pytest.raises(ConfigError, match=rf"^optim.name=\w+: {name}.* (needs|takes) "):
            method.prepare(net, optimizer, co2.Mesh.world())


class OwnRate(torch.optim.Optimizer):
    """Chooses its learning rate itself, as transformers' Adafactor does with relative_step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None, "relative_step": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.01)


def stepped(name: str, kind: Any) -> None:
    """A few steps with an optimizer of this kind."""
    model = nn.Linear(2, 1)
    method = METHODS[name](METHODS[name].Config(**SETTINGS[name]))
    method.prepare(model, kind(model.parameters()), co2.Mesh.world(device="cpu"))
    for _ in range(2 * TAU):
        model(torch.ones(3, 2)).square().mean().backward()
        method.step()
        method.optimizer.zero_grad()
    method.flush()


@pytest.mark.parametrize("name", METHODS)
def test_an_optimizer_that_needs_a_closure(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer=LBFGS: its step needs a closure"):
        stepped(name, torch.optim.LBFGS)


@pytest.mark.parametrize("name", ["slowmo", "co2", "acco", "diloco"])
def test_an_optimizer_that_chooses_its_rate(name: str) -> None:
    """It is refused where the method, or the schedule under this method, needs a rate."""
    if name == "diloco":
        return stepped(name, OwnRate)
    says = r"^optimizer=OwnRate: .*relative_step=False" if name == "acco" else r"^lr=None: .* one$"
    with pytest.raises(ConfigError, match=says):
        stepped(name, OwnRate)
