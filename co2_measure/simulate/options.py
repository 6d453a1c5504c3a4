"""The command line of `python -m co2.simulate` as checked options."""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace

from co2.arguments import number, whole
from co2.errors import nearest, require
from co2.gpus import known_gpu
from co2_measure.simulate.failures import Faults
from co2_measure.simulate.methods import NO_ROUNDS, label, require_simulated
from co2_measure.simulate.models import MODELS, WIRE_BYTES
from co2_measure.simulate.network import COLLECTIVES, Network, parse_link
from co2_measure.simulate.schedule import Figures, Noise, simulate

MOST_GPUS = 2**24


class Options:
    """What is simulated: the command line's words, checked.

    Raises:
        ConfigError: a value that cannot be simulated; its key is the flag.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = _known("--model", args.model, MODELS)
        shape = MODELS[self.model]
        self.units = number("--units", args.units or str(shape.units_per_step), 1e-9)
        """Tokens or images per GPU and step."""
        # Seconds of a step's computation, and where they come from, in words.
        if args.step_time is not None:
            self.step_s, self.compute = number("--step-time", args.step_time, 1e-9), "given"
        else:
            gpu, mfu = known_gpu("--gpu", args.gpu), number("--mfu", args.mfu, 1e-9, 1.0)
            flops = shape.flops_per_unit
            self.step_s = flops * self.units / (gpu.peak_flops * mfu)
            self.compute = f"{flops:.3g} flops each, {mfu:g} of {args.gpu}'s peak, assumed"
        server_size = whole("--server-size", args.server_size)
        inside = parse_link(args.inside, "--inside")
        collective = _known("--collective", args.collective, COLLECTIVES)
        efficiency = number("--efficiency", args.efficiency, 1e-9, 1.0)
        self.networks: dict[str, Network] = {}
        """By the link's name on the command line."""
        for word in _words("--link", args.link):
            link = replace(parse_link(word, "--link"), efficiency=efficiency)
            self.networks[word] = network = Network(link, server_size, inside, collective)
        self.gpus = _gpu_counts(args.gpus)
        for count in self.gpus:
            network.check(count, "--gpus")
        self.base_gpus = whole("--base-gpus", args.base_gpus or str(2 * server_size), MOST_GPUS)
        """The number of GPUs that the scaling ratio is against."""
        network.check(self.base_gpus, "--base-gpus")
        self.methods = _words("--method", args.method)
        for name in self.methods:
            require_simulated("--method", name)
        self.taus = [whole("--tau", word) for word in _words("--tau", args.tau)]
        self.wire = _known("--wire", args.wire, WIRE_BYTES)
        self.bucket_mb = number("--bucket-mb", args.bucket_mb, 0.01)
        self.backward_share = number("--backward-share", args.backward_share, 0.0, 1.0)
        self.average_moments: bool = args.average_moments
        self.fragments = whole("--fragments", args.fragments)
        """Of methods that have them."""
        shortest = min(self.taus)
        hint = f"must be at most --tau, which is {shortest}"
        require(self.fragments <= shortest, "--fragments", self.fragments, hint)
        alone = args.delay is not None and self.fragments == 1
        require(not alone, "--delay", args.delay, "is of a fragment's mean; give --fragments, too")
        self.delay = None if args.delay is None else whole("--delay", args.delay, shortest)
        """Of a fragment's mean, in steps."""
        self.rounds = whole("--rounds", args.rounds)
        self.noise, self.faults = _noise(args), _faults(args)
        self.num_failures = whole("--failures", args.failures)
        """Failures that are drawn for each goodput."""

    def cases(self) -> Iterator[tuple[str, Network, str, int]]:
        """Each link with its network, method and τ; 1 for a method without rounds."""
        for link, network in self.networks.items():
            for method in self.methods:
                for tau in (1,) if method in NO_ROUNDS else self.taus:
                    yield link, network, method, tau

    def line(self, link: str, method: str, tau: int) -> str:
        """The name of a case in a figure: with the link where there are several."""
        return label(method, tau) + (f", {link}" if len(self.networks) > 1 else "")

    def figures(self, network: Network, method: str, tau: int, gpus: int) -> Figures:
        """A simulated run of `rounds` rounds, after as many to settle."""
        return simulate(
            method=method,
            workers=gpus,
            vector_bytes=MODELS[self.model].num_parameters * WIRE_BYTES[self.wire],
            step_s=self.step_s,
            network=network,
            steps=self.rounds * tau,
            tau=tau,
            warmup_rounds=self.rounds,
            units_per_step=self.units,
            bucket_bytes=round(self.bucket_mb * 2**20),
            backward_share=self.backward_share,
            average_moments=self.average_moments,
            fragments=self.fragments,
            delay=self.delay,
            noise=self.noise,
        )


def _noise(args: argparse.Namespace) -> Noise:
    text = args.stragglers
    share = text.endswith("%")
    return Noise(
        jitter=number("--jitter", args.jitter, 0.0),
        slow_share=number("--stragglers", text[:-1], 0.0, 100.0) / 100 if share else 0.0,
        slow_count=0 if share else whole("--stragglers", text, low=0),
        slowdown=number("--slowdown", args.slowdown, 1.0),
        seed=whole("--seed", args.seed, low=0),
    )


def _faults(args: argparse.Namespace) -> Faults:
    every_s = args.checkpoint_every_s
    if every_s is not None:
        every_s = number("--checkpoint-every-s", every_s, 1e-6)
    return Faults(
        mtbf_s=3600 * number("--mtbf-hours", args.mtbf_hours, 1e-6),
        repair_s=number("--repair-s", args.repair_s, 0.0),
        restart_s=number("--restart-s", args.restart_s, 0.0),
        detect_s=number("--detect-s", args.detect_s, 0.0),
        regroup_s=number("--regroup-s", args.regroup_s, 0.0),
        checkpoint_s=number("--checkpoint-s", args.checkpoint_s, 1e-6),
        checkpoint_every_s=every_s,
    )


def _gpu_counts(text: str) -> list[int]:
    """`8..128` is 8, 16, 32, 64, 128; `8,24,100` is itself; the two may be mixed."""
    counts: list[int] = []
    for word in _words("--gpus", text):
        first, dots, last = word.partition("..")
        count = whole("--gpus", first, MOST_GPUS)
        end = whole("--gpus", last, MOST_GPUS) if dots else count
        require(end >= count, "--gpus", word, "must end at its start or above it")
        while count <= end:
            counts.append(count)
            count *= 2
    return list(dict.fromkeys(counts))


def _words(flag: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    require(bool(words), flag, text, "must name at least one")
    return list(dict.fromkeys(words))


def _known(flag: str, text: str, known: Iterable[str]) -> str:
    require(text in known, flag, text, nearest(text, known))
    return text
