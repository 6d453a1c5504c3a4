"""The catalogue and docs/methods.md: their facts and pictures are those of the code."""

import re

import pytest
import torch
from torch import nn

import co2
from benchmarks.method_pictures import DRAWN, picture
from co2.catalogue import CATALOGUE
from co2.config import Blocking
from co2.methods import METHODS
from co2.methods.base import ELASTIC
from tests.cli.harness import ROOT
from tests.grids import grid
from tests.methods.driver import NEEDS_SGD
from tests.workers import Pool

DOCS = ROOT / "docs"
TAU, ROUNDS = 3, 4
PAGE = (DOCS / "methods.md").read_text()
CARDS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |^<!--|\Z)", PAGE, re.M | re.S))
ROWS = {
    name: facts
    for name, *facts in re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \| ([^|]*) \|", PAGE, re.M)
}
"""Method → the table's entries about what it waits for, and about copies."""
WAITS = {
    Blocking.always: r"always\b",
    Blocking.beyond_delay: r"beyond (a round|a step|`delay` steps)$",
}
"""What a method waits for → the table's entry."""
SENT = r"\*\*Sends\*\* (\S+ · \S+) bytes a step"
"""Of a card; first on the page, what a card means that says nothing."""
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
    assert entry.elastic == (ELASTIC not in METHODS[name]().refusals())


def test_other_peoples_methods_declare_what_they_wait_for() -> None:
    class SlowMo(co2.SlowMo):
        blocking = Blocking.beyond_delay

    assert SlowMo.blocking is Blocking.beyond_delay
    assert co2.SlowMo.blocking is CATALOGUE["slowmo"].blocking is Blocking.always


def vectors(name: str) -> float:
    """Averaged in a round."""
    return 1 + sum(1 / period for period in CATALOGUE[name].further)


@pytest.mark.parametrize("name", METHODS)
def test_the_pages_say_what_the_catalogue_does(name: str) -> None:
    entry, (waits, copies), card = CATALOGUE[name], ROWS[name], " ".join(CARDS[name].split())
    assert re.match(WAITS[entry.blocking], waits)
    holds = f"{entry.copies:g}".replace(".25", "¼") + " + 1/G" * entry.cut_copies
    assert copies.startswith(holds)
    assert re.search(rf"\*\*Holds\*\* {re.escape(holds)} cop(y|ies)\b", card)
    [sends, *_] = re.findall(SENT, card) or re.findall(SENT, " ".join(PAGE.split()))
    of_all = {"mean": f"{2 * vectors(name):g}(G−1)/G", "gather": "(G−1)", "pairs": "2⌊G/2⌋/G"}
    under = "τ" if entry.rounds else ""
    if entry.share < 1:
        under = f"({1 / entry.share:.0f}τ)" if entry.rounds else f"{1 / entry.share:.0f}"
    assert sends == f"{of_all[entry.exchange]} · n/{under}".rstrip("/")


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
        assert f"(pictures/{name}.svg)" in CARDS[name]
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == picture(name), name
