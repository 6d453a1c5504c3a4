"""docs/methods.md: a card for every method, whose facts and picture are those of the code."""

import re

import pytest
import torch
from torch import nn

import co2
from benchmarks.method_pictures import DRAWN, picture
from co2.config import Blocking
from co2.methods import METHODS
from tests.cli.harness import ROOT
from tests.grids import grid
from tests.methods.driver import NEEDS_SGD
from tests.workers import Pool

DOCS = ROOT / "docs"
TAU, ROUNDS = 3, 4
PAGE = (DOCS / "methods.md").read_text()
CARDS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |^<!--|\Z)", PAGE, re.M | re.S))
ROWS = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", PAGE, re.M))
"""Method → the table's entry about what it waits for."""
WAITS = {
    Blocking.always: r"always\b",
    Blocking.beyond_delay: r"beyond (a round|a step|`delay` steps)$",
}
"""What a method waits for → the table's entry."""
SENT = r"\*\*Sends\*\* (\S+ · \S+) bytes a step"
"""Of a card; first on the page, what a card means that says nothing."""
SENDS = {
    "2(G−1)/G · n": lambda G, n, tau: 2 * (G - 1) / G * n,
    "2(G−1)/G · n/τ": lambda G, n, tau: 2 * (G - 1) / G * n / tau,
    "(G−1) · n/(111τ)": lambda G, n, tau: (G - 1) * n / (111 * tau),
    "2⌊G/2⌋/G · n/τ": lambda G, n, tau: 2 * (G // 2) / G * n / tau,
    "3(G−1)/G · n/τ": lambda G, n, tau: 3 * (G - 1) / G * n / tau,
    "6(G−1)/G · n/τ": lambda G, n, tau: 6 * (G - 1) / G * n / tau,
    "2(G−1)/G · n/200": lambda G, n, tau: 2 * (G - 1) / G * n / 200,
    "(G−1) · n/85": lambda G, n, tau: (G - 1) * n / 85,
    "2(G−1)/G · n/32": lambda G, n, tau: 2 * (G - 1) / G * n / 32,
}
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
    assert CARDS.keys() == METHODS.keys()
    for name, card in CARDS.items():
        assert f"(../co2/methods/{name}.py)" in card


@pytest.mark.parametrize("name", METHODS)
def test_what_it_waits_for_is_what_the_code_declares(name: str) -> None:
    assert ROWS.keys() == METHODS.keys()
    assert re.match(WAITS[METHODS[name].blocking], ROWS[name].strip()), ROWS[name]


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
    card = " ".join(CARDS[name].split())
    [(copies, mask, part)] = re.findall(r"\*\*Holds\*\* ([\d.]+)(¼)?( \+ 1/G)? cop(?:y|ies)", card)
    expected = float(copies) + (0.25 if mask else 0) + (1 / world if part else 0)
    expected += (world + 1) / 85 if name in NEEDS_SGD else 0  # messages
    [sends, *_] = re.findall(SENT, card) or re.findall(SENT, " ".join(PAGE.split()))
    tau = OWN.get(name, {}).get("tau", TAU)
    helds, sents, (size, *_) = zip(*workers.run(measured, world, name), strict=True)
    assert helds == pytest.approx([expected] * world, rel=0.02)
    # On average: under noloco one of three replicas sends nothing in each round.
    assert sum(sents) / world == pytest.approx(SENDS[sends](world, size, tau), rel=0.01)


def test_pictures_are_what_the_simulator_shows() -> None:
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == set(DRAWN)
    for name in DRAWN:
        assert f"(pictures/{name}.svg)" in CARDS[name]
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == picture(name), name
