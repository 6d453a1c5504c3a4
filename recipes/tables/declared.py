"""Tables of docs/methods.md, made from what the methods declare: the catalogue, their settings and
their refusals. Nothing in them is measured."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from co2.catalogue import CATALOGUE, Entry
from co2.config import Blocking
from co2.methods import METHODS
from co2.methods.base import BF16, ELASTIC, HOST, OTHERS, QUORUM
from co2.methods.shared.rounds import AveragesMoments, LateRounds, Rounds, UnequalRounds
from co2.record.table import Table

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "co2.shard": ("co2", {"shard": True}),
    "streaming_diloco.exchange=int8/int4": ("streaming_diloco", {"exchange": "int8"}),
    "average_moments": ("diloco", {"average_moments": True}),
}
"""Settings that make a method refuse more, as the table names them: a method that has them."""
ASKED = {
    "optim.name=muon": "optim.name=muon",
    "optim.name=adamw": "optim.name=adamw",
    "optim.name=sgd": "optim.name=sgd",
    ELASTIC: "launch.elastic=true",
    QUORUM: "launch.quorum, in elastic runs",
    OTHERS: "another launch.workers, of a resumed run",
    BF16: "comm.dtype=bf16",
    HOST: "comm.device=cpu",
    "mesh.strategy=zero1": "mesh.strategy=zero1",
    "mesh.strategy=zero2": "mesh.strategy=zero2, zero3",
    "mesh.strategy=ep": "mesh.strategy=ep",
}
"""Keys of `Method.refusals`, as the table asks for them. zero3's refusals are zero2's."""
ALSO = {QUORUM: ELASTIC, "mesh.strategy=ep": "mesh.strategy=zero2"}
"""Keys → others whose refusals are theirs too (Method.refuse)."""
SIMULATED = "co2.simulate"
"""Not a setting, but what leaves methods out as well."""
SHARED: Mapping[str, type] = {
    "tau=auto": Rounds,
    "tau_power": UnequalRounds,
    "blocking_share": LateRounds,
    "average_moments": AveragesMoments,
}
"""Settings that several methods have, and the configuration from which they have them."""


def methods() -> Table:
    """What each method averages, sends, waits for and holds."""
    return Table(
        ("method", "what is averaged", "bytes a step", "waits for the network", "extra copies"),
        [
            (f"[`{name}`](#{name})", entry.averages, sends(entry), waits(name), copies(entry))
            for name, entry in CATALOGUE.items()
        ],
        title="Methods",
        text="With their default settings.",
    )


def sends(entry: Entry) -> str:
    """Bytes a step, by G, n and τ."""
    vectors = 1 + sum(1 / period for period in entry.further)
    of_all = {"mean": f"{2 * vectors:g}(G−1)/G", "gather": "(G−1)", "pairs": "2⌊G/2⌋/G"}
    under = "τ" if entry.rounds else ""
    if entry.share < 1:
        part = f"{1 / entry.share:.0f}"
        under = f"({part}τ)" if entry.rounds else part
    return f"{of_all[entry.exchange]} · n/{under}".rstrip("/")


def waits(name: str) -> str:
    """What a replica stands still for."""
    entry, keys = CATALOGUE[name], {own.name for own in fields(METHODS[name].Config)}
    if entry.blocking is Blocking.beyond_delay:
        if "delay" in keys:
            return "beyond `delay` steps"
        return "beyond a round" if entry.rounds else "beyond a step"
    partly = ", partly hidden" if METHODS[name].averages_gradients else ""
    return f"always{', for one other' if entry.exchange == 'pairs' else partly}"


def copies(entry: Entry) -> str:
    """Model copies beyond weights, gradients and inner state."""
    return f"{entry.copies:g}".replace(".25", "¼") + " + 1/G" * entry.cut_copies


def refusals() -> Table:
    """By setting: the methods that refuse it."""
    rows = []
    for key, asked in ASKED.items():
        rows.append((_code(asked), ", ".join(refusing(key))))
    left_out = [f"`{name}`" for name, entry in CATALOGUE.items() if entry.not_simulated]
    rows.append((f"`{SIMULATED}`", ", ".join(left_out)))
    return Table(
        ("setting", "refused by"),
        rows,
        title="Refusals",
        text="A refusal is one line, before any worker starts; it says why, and what to use.",
    )


def _code(asked: str) -> str:
    key, comma, rest = asked.partition(",")
    return f"`{key}`{comma}{rest}"


def refusing(key: str) -> list[str]:
    """The methods, and settings of methods, that refuse a key of `Method.refusals`."""
    found = []
    for name in METHODS:
        if _refuses(name, {}, key):
            whole = CATALOGUE[name].fragments and not _refuses(name, {"fragments": 1}, key)
            found.append(f"`{name}`" + " unless `fragments=1`" * whole)
    for told, (name, settings) in VARIANTS.items():
        if f"`{name}`" not in found and _refuses(name, settings, key):
            found.append(f"`{told}`")
    return found


def _refuses(name: str, settings: Mapping[str, Any], key: str) -> bool:
    if key == OTHERS and not CATALOGUE[name].any_number:
        return True
    found = METHODS[name](**settings).refusals()
    return key in found or ALSO.get(key) in found


def shared() -> Table:
    """By setting that several methods share: those that have it."""
    return Table(
        ("setting", "of"),
        [
            (
                f"`{key}`",
                ", ".join(f"`{name}`" for name, m in METHODS.items() if issubclass(m.Config, kind)),
            )
            for key, kind in SHARED.items()
        ],
        title="Settings of several methods",
    )
