"""The CO2 paper's scaling figures, beside what the simulator makes of them.

The source is Sun et al., ICLR 2024, arXiv 2401.16265: scalability of TransNormer-LLM 7B with ZeRO
over 80 Gbps TCP/IP, in words per second, on servers of eight A100. A word is taken as a token.

The paper gives neither the tokens of a step nor a step's time, so the simulator is fitted to some
of the figures. Those are marked, and only the others say anything about the simulator.
"""

from dataclasses import dataclass, replace

import numpy as np

from co2.gpus import GPUS
from co2.simulate.models import MODELS
from co2.simulate.network import PROFILES, Link, Network
from co2.simulate.report import Report
from co2.simulate.schedule import BUCKET_BYTES, simulate

PAPER = {
    "AdamW, 8 GPUs": 18_444.0,
    "AdamW, 16 GPUs": 3_488.0,
    "AdamW, 128 GPUs": 22_810.0,
    "AdamW, T(128)/(8·T(16))": 0.82,
    "CO2 τ=48, 128 GPUs": 304_736.0,
    "CO2 τ=48, T(128)/(8·T(16))": 1.06,
    "CO2 τ=12, T(128)/(8·T(16))": 0.86,
    "CO2 τ=48 / AdamW, 128 GPUs": 13.4,
}

"""Words per second of all GPUs, and ratios of them, as the paper reports them."""

SHAPE = MODELS["transnormer-7b"]
VECTOR_BYTES = 4 * SHAPE.num_parameters
SERVER_SIZE = 8
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Setting:
    """One column: a step's compute time and a network, and which rows they were fitted to."""

    name: str
    """What is calibrated."""
    step_s: float
    """Seconds of a step's computation."""
    network: Network
    fitted: tuple[str, ...]
    """The rows of `PAPER` that were used up in the fit."""

    def throughput(self, method: str, workers: int, tau: int = 1) -> float:
        """Tokens per second of all GPUs, in the steady state."""
        return simulate(
            method=method,
            workers=workers,
            vector_bytes=VECTOR_BYTES,
            step_s=self.step_s,
            network=self.network,
            steps=2 * tau,
            tau=tau,
            warmup_rounds=2,
            units_per_step=SHAPE.units_per_step,
            backward_share=BACKWARD_SHARE,
        ).throughput

    def figures(self) -> dict[str, float]:
        """The paper's rows, simulated."""
        adamw = {workers: self.throughput("allreduce", workers) for workers in (8, 16, 128)}
        co2 = {
            (tau, workers): self.throughput("co2", workers, tau)
            for tau in (12, 48)
            for workers in (16, 128)
        }
        values = (
            *adamw.values(),
            adamw[128] / (8 * adamw[16]),
            co2[48, 128],
            co2[48, 128] / (8 * co2[48, 16]),
            co2[12, 128] / (8 * co2[12, 16]),
            co2[48, 128] / adamw[128],
        )
        return dict(zip(PAPER, values, strict=True))


def settings() -> list[Setting]:
    """Three columns, with one, two and three calibrated quantities."""
    network = Network(PROFILES["80gbps-tcp"], SERVER_SIZE)
    step_s = compute_s(network)
    rows = ("AdamW, 8 GPUs", "AdamW, 16 GPUs", "AdamW, 128 GPUs")
    rated = replace(network, link=_link_of_one(step_s))
    both = replace(network, link=_link_of_two(step_s))
    return [
        Setting("compute", step_s, network, rows[:1]),
        Setting("compute and rate", step_s, rated, rows[:2]),
        Setting("compute, rate and latency", step_s, both, (*rows, "AdamW, T(128)/(8·T(16))")),
    ]


def compute_s(network: Network) -> float:
    """Seconds of a step's computation, from AdamW on the 8 GPUs of one server.

    There all buckets but the last are hidden behind backward, so the last one's time is taken off.
    """
    last = VECTOR_BYTES % BUCKET_BYTES or BUCKET_BYTES
    return _paper_step_s(8) - network.all_reduce_s(last, 8)


def report() -> Report:
    """The paper's figures in one column, three simulations beside them, the fitted ones marked."""
    columns = settings()
    simulated = [column.figures() for column in columns]
    records, cells = [], []
    for name, paper in PAPER.items():
        record: dict[str, object] = {"figure": name, "paper": paper}
        line = [name, _rounded(paper)]
        for column, values in zip(columns, simulated, strict=True):
            fitted = name in column.fitted
            record |= {f"simulated: {column.name}": values[name], f"fitted: {column.name}": fitted}
            difference = "calibrated" if fitted else f"{values[name] / paper - 1:+.0%}"
            line.append(f"{_rounded(values[name])} ({difference})")
        records.append(record)
        cells.append(line)
    head = ["figure", "paper", *(f"calibrated: {c.name}" for c in columns)]
    return Report(
        "TransNormer-LLM 7B, 80 Gbps TCP/IP, words/s", statement(columns), head, cells, records
    )


def statement(columns: list[Setting]) -> str:
    """What was taken from the paper, what was assumed, and what the fit implies."""
    step_s = columns[0].step_s
    peak = SHAPE.flops_per_unit * SHAPE.units_per_step / step_s / GPUS["a100-80g"].peak_flops
    nominal, rated, both = (column.network.link for column in columns)
    return (
        "Simulated, not measured; in brackets the difference from the paper, or `calibrated` where "
        "the figure was used up in the fit and proves nothing. No figure of CO2's was used in any. "
        f"Compute time is from AdamW on 8 GPUs: {step_s:.3g} s per step, {peak:.0%} of an A100's "
        f"peak. First column: the nominal link, {nominal.rate_bits / 1e9:g} Gbit/s for a server, "
        f"with {nominal.latency_s * 1e6:.0f} µs assumed. Second: its rate from AdamW on 16 GPUs, "
        f"{rated.rate_bits / 1e9:.3g} Gbit/s without latency. Third: rate and latency from AdamW "
        f"on 16 and 128 GPUs, {both.rate_bits / 1e9:.3g} Gbit/s and {both.latency_s * 1e6:.0f} µs "
        "per phase; it stands for all that grows with the number of GPUs. Assumed: "
        f"{SHAPE.units_per_step:,} tokens per GPU and step (480 × 1,024 on 64 GPUs, the paper's "
        "for language models, not given for this experiment), fp32 on the wire, a flat ring, "
        "buckets of 25 MiB, backward two thirds of a step, as many bytes under ZeRO as without. "
        "With other tokens or another wire format the first column changes; in the others the "
        "fitted rate and latency do, and the table stays as it is, to a percent."
    )


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _paper_step_s(workers: int) -> float:
    return workers * SHAPE.units_per_step / PAPER[f"AdamW, {workers} GPUs"]


def _wire_s(workers: int, step_s: float) -> float:
    """Seconds of AdamW's all-reduce on `workers` GPUs, from the paper's throughput.

    The network sets the pace from the first bucket on, so a step consists of the computation until
    the first bucket is ready and of all buckets on the wire: see `_Bucketed` in schedule.py.
    """
    ready = 1 - BACKWARD_SHARE + BACKWARD_SHARE * BUCKET_BYTES / VECTOR_BYTES
    return _paper_step_s(workers) - ready * step_s


def _ring_terms(workers: int) -> tuple[float, float]:
    """(a, b), where a ring over all buckets takes a · (seconds per bit) + b · latency seconds."""
    phases = 2 * (workers - 1)
    return 8 * VECTOR_BYTES * phases / workers, phases * -(-VECTOR_BYTES // BUCKET_BYTES)


def _link_of_one(step_s: float) -> Link:
    """The link without latency over which the ring of 16 takes as long as the paper's did."""
    bits, _ = _ring_terms(16)
    return Link(bits / _wire_s(16, step_s))


def _link_of_two(step_s: float) -> Link:
    """The link over which the rings of 16 and of 128 take as long as the paper's did."""
    sizes = (16, 128)
    times = [_wire_s(workers, step_s) for workers in sizes]
    seconds_per_bit, latency_s = np.linalg.solve([_ring_terms(w) for w in sizes], times)
    return Link(1 / float(seconds_per_bit), float(latency_s))
