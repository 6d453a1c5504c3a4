"""The command line's words as trials and conditions, each wrong one refused in one line."""

import argparse
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from co2.arguments import whole
from co2.errors import ConfigError, nearest, require
from co2_measure.lab.trial import LIMIT, Change, Conditions, Trial, rate_name
from co2_measure.peers import PEERS, check_installed, known_methods

_WORKER_BYTES = 2**30
"""An upper guess at the memory that a worker of a smoke-scale task needs."""
_CHANGE = re.compile(r"(?:([^@:]+):)?([^@:]+)@(\d+\.?\d*|\.\d+)s")


def plan(options: argparse.Namespace) -> tuple[list[Trial], Conditions]:
    """The trials in the order in which they are measured, and their conditions.

    Raises:
        ConfigError: a value from which no trial can be made; its key is the option.
    """
    workers = [whole("--workers", word) for word in options.workers.split(",")]
    rates = [_rate("--mbit", word) for word in options.mbit.split(",")]
    methods = options.methods.split(",")
    known = {*known_methods(), LIMIT}
    for method in methods:
        require(method in known, "--methods", method, nearest(method, known))
        if method in PEERS:
            check_installed(method)
    repeats = whole("--repeats", options.repeats)
    conditions = Conditions(
        tuple(_change(word, rates) for word in options.schedule),
        tuple(_slow("--slow-link", word, min(workers)) for word in options.slow_link),
        tuple(_slow("--slow-cpu", word, min(workers)) for word in options.slow_cpu),
        pin=options.pin,
    )
    check_memory(max(workers))
    # Methods take turns within a repeat, so that a noisy minute does not fall on one of them.
    order = itertools.product(range(repeats), workers, rates, methods)
    return [Trial(w, rate, method, n) for n, w, rate, method in order], conditions


def check_memory(workers: int) -> None:
    """Raise `ConfigError` for more workers than fit into the machine's free memory, by a guess of
    1 GiB for each."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    fitting = int(kib) * 1024 // _WORKER_BYTES
    hint = f"some {fitting} workers fit into this machine's free memory"
    require(workers <= fitting, "--workers", workers, hint)


def _rate(key: str, word: str) -> float | None:
    hint = "must be Mbit/s above 0, or unlimited"
    return None if word == "unlimited" else _above_0(word, key, word, hint)


def _change(word: str, rates: Sequence[float | None]) -> Change:
    """`20@10s` is 20 Mbit/s after 10 s; `100:20@10s` the same for trials of 100 Mbit/s only."""
    match = _CHANGE.fullmatch(word)
    if match is None:
        hint = "must be RATE@SECONDSs or FROM:RATE@SECONDSs, as in 20@10s or 100:20@10s"
        raise ConfigError("--schedule", word, hint)
    only_rate = match[1]
    if only_rate is not None:
        known = [rate_name(rate) for rate in rates]
        only_rate = rate_name(_rate("--schedule", only_rate))
        hint = f"no trial has links of {only_rate}; known: {known}"
        require(only_rate in known, "--schedule", word, hint)
    return Change(float(match[3]), _rate("--schedule", match[2]), only_rate)


def _slow(key: str, word: str, workers: int) -> tuple[int, float]:
    """`1:10` is worker 1, one of `workers`, and the value 10."""
    worker, _, value = word.partition(":")
    hint = "must be WORKER:VALUE with a value above 0, as in 1:0.5"
    require(worker.isdecimal(), key, word, hint)
    number = _above_0(value, key, word, hint)
    require(int(worker) < workers, key, worker, f"workers are counted from 0 to {workers - 1}")
    return int(worker), number


def _above_0(text: str, key: str, word: str, hint: str) -> float:
    """The number above 0 that the text, a part of the option's word, says."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    require(0 < value < math.inf, key, word, hint)
    return value
