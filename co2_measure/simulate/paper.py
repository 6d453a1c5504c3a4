"""The CO2 paper's scaling figures, beside what the simulator makes of them.

The source is Sun et al., ICLR 2024, arXiv 2401.16265: scalability of TransNormer-LLM 7B with ZeRO
over 80 Gbps TCP/IP, in words per second, on servers of eight A100. A word is taken as a token.

The paper gives neither the tokens of a step nor a step's time, so the simulator is fitted to some
of the figures. Those are marked, and only the others say anything about the simulator.
"""

from dataclasses import dataclass, replace

import numpy as np

from co2.gpus import GPUS
from co2_measure.simulate.models import MODELS
from co2_measure.simulate.network import PROFILES, Link, Network
from co2_measure.simulate.report import Report
from co2_measure.simulate.schedule import BUCKET_BYTES, simulate

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
        adamw = {n: self.throughput("allreduce", n) for n in (8, 16, 128)}
        co2 = {(tau, n): self.throughput("co2", n, tau) for tau in (12, 48) for n in (16, 128)}
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
    """Three columns, with one, two and three calibrated quantities.

    Seconds of a step's computation are from AdamW on the 8 GPUs of one server. There all buckets
    but the last are hidden behind backward, so the last one's time is taken off. Between servers
    the network sets the pace from the first bucket on, so a step consists of the computation until
    the first bucket is ready and of all buckets on the wire: see `_bucketed` in schedule.py. That
    gives the seconds on the wire of 16 and of 128 GPUs. A ring over all buckets takes
    a · (seconds per bit) + b · (latency), which the link's rate, or its rate and latency, solve.
    """
    network = Network(PROFILES["80gbps-tcp"], SERVER_SIZE)
    rows = {workers: f"AdamW, {workers} GPUs" for workers in (8, 16, 128)}
    paper_s = {
        workers: workers * SHAPE.units_per_step / PAPER[row] for workers, row in rows.items()
    }
    step_s = paper_s[8] - network.all_reduce_s(VECTOR_BYTES % BUCKET_BYTES or BUCKET_BYTES, 8)
    ready = 1 - BACKWARD_SHARE + BACKWARD_SHARE * BUCKET_BYTES / VECTOR_BYTES
    terms, wire_s = [], []
    for workers in (16, 128):
        phases = 2 * (workers - 1)
        num_buckets = -(-VECTOR_BYTES // BUCKET_BYTES)
        terms.append((8 * VECTOR_BYTES * phases / workers, phases * num_buckets))
        wire_s.append(paper_s[workers] - ready * step_s)
    rated = Link(terms[0][0] / wire_s[0])
    seconds_per_bit, latency_s = np.linalg.solve(terms, wire_s)
    both = Link(1 / float(seconds_per_bit), float(latency_s))
    fitted = (*rows.values(), "AdamW, T(128)/(8·T(16))")
    return [
        Setting("compute", step_s, network, fitted[:1]),
        Setting("compute and rate", step_s, replace(network, link=rated), fitted[:2]),
        Setting("compute, rate and latency", step_s, replace(network, link=both), fitted),
    ]


def report() -> Report:
    """The paper's figures in one column, three simulations beside them, the fitted ones marked."""
    columns = {setting: setting.figures() for setting in settings()}
    records: list[dict[str, object]] = [{"figure": name, "paper": PAPER[name]} for name in PAPER]
    cells = [[name, _rounded(PAPER[name])] for name in PAPER]
    for setting, simulated in columns.items():
        for (name, paper), record, line in zip(PAPER.items(), records, cells, strict=True):
            value, fitted = simulated[name], name in setting.fitted
            record |= {f"simulated: {setting.name}": value, f"fitted: {setting.name}": fitted}
            difference = "calibrated" if fitted else f"{value / paper - 1:+.0%}"
            line.append(f"{_rounded(value)} ({difference})")
    head = ["figure", "paper", *(f"calibrated: {setting.name}" for setting in columns)]
    title = "TransNormer-LLM 7B, 80 Gbps TCP/IP, words/s"
    return Report(title, _statement([*columns]), head, cells, records)


def _statement(columns: list[Setting]) -> str:
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
