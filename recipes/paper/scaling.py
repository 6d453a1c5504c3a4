"""The paper's table of scalability: by simulation and as measured here, beside what the paper
reports.

Simulated values are neither measured nor the paper's: they have lines and figures of their own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from co2.record.table import NOTHING, Table
from co2_measure.simulate.network import PROFILES
from co2_measure.simulate.paper import SERVER_SIZE, Setting, settings
from recipes.recipe import Row, Rows
from recipes.tables import figures

GPUS = (8, 16, 32, 64, 128)
RATIO = "T(128)/(8·T(16))"
METHODS = {
    "AllReduce": ("allreduce", 1),
    "Local SGD, SlowMo, τ = 12": ("local_sgd", 12),
    "CO2, τ = 12": ("co2", 12),
    "CO2, τ = 48": ("co2", 48),
}
"""Method and τ to simulate. All methods that wait at the end of a round have one schedule, and all
that overlap another."""
LINES = tuple(Row(name, (f"method={method}",)) for name, (method, _) in METHODS.items())
TCP, RDMA = "80 Gbit/s TCP/IP", "800 Gbit/s RDMA"
LINKS = {TCP: "80gbps-tcp", RDMA: "800gbps-rdma"}
PAPER, NOMINAL, FITTED = "paper", "simulated", "simulated, fitted"
HERE = "measured here"
USED_UP = "†"
TICKS = (10_000, 30_000, 100_000, 300_000)


def columns() -> dict[tuple[str, str], Setting]:
    """A simulation for each network and each kind of link, nominal or fitted."""
    nominal, _, fitted = settings()
    found = {
        (place, NOMINAL): replace(nominal, network=replace(nominal.network, link=PROFILES[link]))
        for place, link in LINKS.items()
    }
    return {**found, (TCP, FITTED): fitted}


def throughput(setting: Setting, method: str) -> dict[int, float]:
    """Tokens per second of all GPUs, by their number."""
    name, tau = METHODS[method]
    return {gpus: setting.throughput(name, gpus, tau) for gpus in GPUS}


def tables(here: Mapping[str, Mapping[int, float]], paper: Rows) -> Iterable[Table]:
    """One table with a line for each network, method and source of the values.

    Args:
        here: by one of `METHODS` and number of GPUs, tokens per second that were measured.
    """
    simulations = columns()
    rows = []
    for place in LINKS:
        for method in METHODS:
            reported = {r["column"]: r["value"] for r in paper if r["row"] == method}
            words = [reported.get(f"{place}, {gpus} GPUs", NOTHING) for gpus in GPUS]
            words.append(reported.get(f"{place}, {RATIO}", NOTHING))
            if set(words) != {NOTHING}:
                values = [f"{int(word):,}" if word.isdecimal() else word for word in words]
                rows.append((place, method, PAPER, *values))
            for (where, source), setting in simulations.items():
                if where == place:
                    rows.append((place, method, source, *_simulated(setting, method)))
    for method, found in here.items():
        values = [f"{found[gpus]:,.0f}" if gpus in found else NOTHING for gpus in GPUS]
        whole = {16, 128} <= found.keys()
        rows.append(("here", method, HERE, *values, _ratio(found) if whole else NOTHING))
    step_s = simulations[TCP, NOMINAL].step_s
    link = simulations[TCP, FITTED].network.link
    yield Table(
        name="table3_simulated",
        title="Scalability, simulated: TransNormer-LLM 7B by the number of A100",
        text=f"{'Measured here as above; the rest is not' if here else 'Not'} measured. Tokens per "
        "second of all GPUs by the simulator, in lines of their own beside what the CO2 paper "
        f"reports. {USED_UP}: used up in the fit, so it proves nothing; "
        f"no figure of CO2's was used. A step computes for {step_s:.3g} s, from AdamW on 8 "
        "GPUs; the other assumptions are those of `python -m co2.simulate --paper`. Fitted link: "
        f"rate and latency from AdamW on 16 and 128 GPUs, {link.rate_bits / 1e9:.3g} "
        f"Gbit/s and {link.latency_s * 1e6:.0f} µs for a server of {SERVER_SIZE}. "
        "Overlap-Local-SGD and CoCoD-SGD have CO2's schedule.",
        head=("network", "method", "source", *map(str, GPUS), RATIO),
        rows=rows,
        source="Paper: results/paper.csv. Simulated by co2_measure/simulate/schedule.py, which "
        "results/lab/simulator.md holds against the laboratory.",
    )


def _simulated(setting: Setting, method: str) -> list[str]:
    found = throughput(setting, method)
    words = [*(f"{value:,.0f}" for value in found.values()), _ratio(found)]
    names = [*(f"AdamW, {gpus} GPUs" for gpus in GPUS), f"AdamW, {RATIO}"]
    if method != "AllReduce":
        return words
    return [
        f"{word}{USED_UP}" if name in setting.fitted else word
        for word, name in zip(words, names, strict=True)
    ]


def _ratio(found: Mapping[int, float]) -> str:
    return f"{found[128] / (8 * found[16]):.2f}"


def draw(stem: Path) -> Iterator[Path]:
    """Draw a panel for each network, with nominal links."""
    simulations = columns()
    for place in LINKS:
        path = figures.beside(stem, "simulated", place)
        with figures.panel(path, f"simulated: {place}") as axis:
            for line, style in figures.styles(LINES).items():
                found = throughput(simulations[place, NOMINAL], line)
                axis.plot(list(found), list(found.values()), **style)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_ylim(10_000, 500_000)
            axis.set_yticks(TICKS, [f"{tick:,}" for tick in TICKS])
            axis.set_yticks([], minor=True)
            axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
            axis.set_xlabel("GPUs")
            axis.set_ylabel("tokens/s of all GPUs")
        yield path
