"""What a cluster would do: step time, exposed communication, throughput and scaling, on paper.

python -m co2.simulate --model gpt2-small --gpus 8..131072 --method allreduce,co2 --tau 12,48
python -m co2.simulate --model transnormer-7b --link 80gbps-tcp,1gbit@50us --jitter 0.1
python -m co2.simulate --paper          the CO2 paper's scaling figures, beside simulated ones

The arithmetic is in network.py (links, collectives) and schedule.py (rounds).
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from co2.errors import ConfigError, nearest, require, require_number
from co2.simulate import paper as paper_scaling
from co2.simulate import report as simulate_report
from co2.simulate.models import GPUS, MODELS, WIRE_BYTES
from co2.simulate.network import COLLECTIVES, Network, parse_link
from co2.simulate.schedule import SIMULATED, Figures, Noise, simulate

REFUSED = 2
MOST_GPUS = 2**24


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    model: str
    gpus: list[int]
    base_gpus: int
    networks: dict[str, Network]
    methods: list[str]
    taus: list[int]
    step_s: float
    compute: str
    """Where `step_s` comes from, in words."""
    units: float
    wire: str
    bucket_mb: float
    backward_share: float
    rounds: int
    noise: Noise

    def figures(self, network: Network, method: str, tau: int, gpus: int) -> Figures:
        round_steps = 1 if method in ("none", "allreduce") else tau
        return simulate(
            method=method,
            workers=gpus,
            vector_bytes=MODELS[self.model].num_parameters * WIRE_BYTES[self.wire],
            step_s=self.step_s,
            network=network,
            steps=self.rounds * round_steps,
            tau=tau,
            warmup_rounds=self.rounds,
            units_per_step=self.units,
            bucket_bytes=round(self.bucket_mb * 2**20),
            backward_share=self.backward_share,
            noise=self.noise,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 2 for a value that cannot be simulated."""
    args = _parser().parse_args(argv)
    command = shlex.join(
        ["python", "-m", "co2.simulate", *(sys.argv[1:] if argv is None else argv)]
    )
    try:
        if args.paper:
            report = paper_scaling.report()
        else:
            options = check(args)
            report = simulate_report.scaling(options.model, statement(options), run(options))
        report.save(command, args.csv, args.markdown, args.figure)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    report.show()
    return 0


def run(options: Options) -> list[dict[str, Any]]:
    """A row for each link, method, τ and number of GPUs: `Figures`, and what they are against."""
    rows = []
    for link, network in options.networks.items():
        limits = [options.figures(network, "none", 1, gpus).throughput for gpus in options.gpus]
        for method in options.methods:
            for tau in [1] if method in ("none", "allreduce") else options.taus:
                base = options.figures(network, method, tau, options.base_gpus)
                for gpus, limit in zip(options.gpus, limits, strict=True):
                    found = options.figures(network, method, tau, gpus)
                    row = {"link": link, "method": method, "tau": tau, "gpus": gpus}
                    row |= asdict(found) | {"of_limit": found.throughput / limit}
                    row["scaling_ratio"] = scaling_ratio(
                        found.throughput, gpus, base.throughput, options.base_gpus
                    )
                    rows.append(row)
    return rows


def scaling_ratio(throughput: float, gpus: int, base: float, base_gpus: int) -> float:
    """Throughput against that of fewer GPUs, scaled up: the CO2 paper's T(128)/(8·T(16))."""
    return throughput / (gpus / base_gpus * base)


def statement(options: Options) -> str:
    """What the figures rest on, in sentences."""
    unit = MODELS[options.model].unit
    network = next(iter(options.networks.values()))
    noise, differ = options.noise, ""
    if noise.jitter:
        differ += f"Jitter {noise.jitter:g} of a step's time, seed {noise.seed}. "
    if noise.slow_count or noise.slow_share:
        slow = f"{noise.slow_share:.3g} of all" if noise.slow_share else noise.slow_count
        differ += f"Slower by {noise.slowdown:g} in every step: {slow}. "
    return (
        f"Simulated, not measured. {options.units:g} {unit} per GPU and step; a step computes for "
        f"{options.step_s:.4g} s ({options.compute}); {options.wire} on the wire in buckets of "
        f"{options.bucket_mb:g} MiB; backward is the last {options.backward_share:.0%} of a step. "
        f"Servers of {network.server_size} share a link, of which {network.link.efficiency:.0%} is "
        f"left for payload; all-reduce: {network.collective}. "
        f"{differ}comm_s is per collective, exposed_s per step, of_limit is against GPUs that "
        "never wait for each other, scaling_ratio = "
        f"T(G)/(G/{options.base_gpus}·T({options.base_gpus}))."
    )


def check(args: argparse.Namespace) -> Options:
    """The parsed words as checked options. Raises `ConfigError`, its key the flag."""
    model = _known("--model", args.model, MODELS)
    shape = MODELS[model]
    units = (
        _number("--units", args.units, 1e-9)
        if args.units is not None
        else float(shape.units_per_step)
    )
    if args.step_time is not None:
        step_s, compute = _number("--step-time", args.step_time, 1e-9), "given"
    else:
        gpu, mfu = _known("--gpu", args.gpu, GPUS), _number("--mfu", args.mfu, 1e-9, 1.0)
        step_s = shape.step_s(units, GPUS[gpu], mfu)
        compute = f"{shape.flops_per_unit:.3g} flops each, {mfu:g} of {gpu}'s peak, assumed"
    gpus = _gpu_counts(args.gpus)
    server_size = _whole("--server-size", args.server_size)
    base_gpus = 2 * server_size
    if args.base_gpus is not None:
        base_gpus = _whole("--base-gpus", args.base_gpus, MOST_GPUS)
    network = Network(
        parse_link("80gbps-tcp"),
        server_size,
        parse_link(args.inside, "--inside"),
        _known("--collective", args.collective, COLLECTIVES),
    )
    for flag, counts in (("--gpus", gpus), ("--base-gpus", [base_gpus])):
        for count in counts:
            _flagged(flag, network.check, count)
    return Options(
        model=model,
        gpus=gpus,
        base_gpus=base_gpus,
        networks=_networks(args, network),
        methods=[_known("--method", name, SIMULATED) for name in _words("--method", args.method)],
        taus=[_whole("--tau", word) for word in _words("--tau", args.tau)],
        step_s=step_s,
        compute=compute,
        units=units,
        wire=_known("--wire", args.wire, WIRE_BYTES),
        bucket_mb=_number("--bucket-mb", args.bucket_mb, 0.01),
        backward_share=_number("--backward-share", args.backward_share, 0.0, 1.0),
        rounds=_whole("--rounds", args.rounds),
        noise=_noise(args),
    )


def _networks(args: argparse.Namespace, network: Network) -> dict[str, Network]:
    efficiency = _number("--efficiency", args.efficiency, 1e-9, 1.0)
    links = {word: parse_link(word, "--link") for word in _words("--link", args.link)}
    return {
        word: replace(network, link=replace(link, efficiency=efficiency))
        for word, link in links.items()
    }


def _noise(args: argparse.Namespace) -> Noise:
    text = args.stragglers
    share = text.endswith("%")
    return Noise(
        jitter=_number("--jitter", args.jitter, 0.0),
        slow_share=_number("--stragglers", text[:-1], 0.0, 100.0) / 100 if share else 0.0,
        slow_count=0 if share else _whole("--stragglers", text, low=0),
        slowdown=_number("--slowdown", args.slowdown, 1.0),
        seed=_whole("--seed", args.seed, low=0),
    )


def _gpu_counts(text: str) -> list[int]:
    """`8..128` is 8, 16, 32, 64, 128; `8,24,100` is itself; both may be mixed."""
    counts: list[int] = []
    for word in _words("--gpus", text):
        first, dots, last = word.partition("..")
        count = _whole("--gpus", first, MOST_GPUS)
        end = _whole("--gpus", last, MOST_GPUS) if dots else count
        require(end >= count, "--gpus", word, "must end at its start or above it")
        while count <= end:
            counts.append(count)
            count *= 2
    return list(dict.fromkeys(counts))


def _words(flag: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    require(bool(words), flag, text, "must name at least one")
    return list(dict.fromkeys(words))


def _whole(flag: str, text: str, high: int | None = None, low: int = 1) -> int:
    good = text.strip().isdecimal() and low <= int(text) and (high is None or int(text) <= high)
    upto = "" if high is None else f" and {high:,} or less"
    require(good, flag, text, f"must be a whole number, {low} or more{upto}")
    return int(text)


def _number(flag: str, text: str, low: float, high: float = math.inf) -> float:
    hint = f"must be a number of {low:g} or more" + (f", {high:g} at most" * (high < math.inf))
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(flag, text, hint) from None
    require_number(flag, number, low, hint)
    require(number <= high, flag, text, hint)
    return number


def _known(flag: str, text: str, known: Iterable[str]) -> str:
    require(text in known, flag, text, nearest(text, known))
    return text


def _flagged(flag: str, test: Callable[[Any], None], value: Any) -> None:
    try:
        test(value)
    except ConfigError as error:
        raise ConfigError(flag, error.value, error.hint) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m co2.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    lists = parser.add_argument_group("compared; lists are separated by commas")
    lists.add_argument("--gpus", default="8..1024", help="8..1024: powers of two from 8; 8,24,100")
    lists.add_argument(
        "--link", default="80gbps-tcp", help="of a server: a profile, or 20mbit@50us"
    )
    lists.add_argument("--method", default="allreduce,co2", help=", ".join(SIMULATED))
    lists.add_argument("--tau", default="12", help="steps of a round")
    model = parser.add_argument_group("the model, and what a step costs to compute")
    model.add_argument("--model", default="gpt2-small", help=", ".join(MODELS))
    model.add_argument("--units", help="tokens or images per GPU and step")
    model.add_argument("--gpu", default="a100", help=", ".join(GPUS))
    model.add_argument("--mfu", default="0.4", help="share of the GPU's peak that training reaches")
    model.add_argument("--step-time", help="seconds of a step's computation, instead of the above")
    wire = parser.add_argument_group("the network")
    wire.add_argument("--wire", default="fp32", help="fp32 or bf16")
    wire.add_argument("--collective", default="auto", help=", ".join(COLLECTIVES))
    wire.add_argument("--bucket-mb", default="25", help="MiB that one collective carries at most")
    wire.add_argument("--server-size", default="8", help="GPUs that share a link to the others")
    wire.add_argument("--inside", default="nvswitch", help="link of a GPU inside its server")
    wire.add_argument("--efficiency", default="1", help="share of the rate left for payload")
    wire.add_argument("--backward-share", default="0.6667", help="of a step, gradients ripening")
    noise = parser.add_argument_group("replicas that differ")
    noise.add_argument("--jitter", default="0", help="coefficient of variation of a step's time")
    noise.add_argument("--stragglers", default="0", help="slow replicas: a number, or 1%% of all")
    noise.add_argument("--slowdown", default="1.5", help="their factor")
    noise.add_argument("--seed", default="0")
    noise.add_argument("--rounds", default="50", help="measured, after as many to settle")
    out = parser.add_argument_group("output")
    out.add_argument("--base-gpus", help="T(base) of the scaling ratio; default: two servers")
    out.add_argument("--csv", metavar="FILE")
    out.add_argument("--markdown", metavar="FILE")
    out.add_argument("--figure", metavar="FILE", help="throughput and scaling against GPUs")
    out.add_argument("--paper", action="store_true", help="the paper's figures beside simulated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
