"""The command line's words as trials and conditions, each wrong one refused in one line."""

import argparse
import contextlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from co2.errors import nearest, require
from co2.lab.trial import LIMIT, Change, Conditions, Trial, rate_name
from co2.peers import PEERS, check_installed, known_methods

_WORKER_BYTES = 2**30
"""An upper guess at the memory that a worker of a smoke-scale task needs."""


def plan(options: argparse.Namespace) -> tuple[list[Trial], Conditions]:
    """The trials in the order in which they are measured, and their conditions.

    Raises:
        ConfigError: a value from which no trial can be made; its key is the option.
    """
    workers = [_count("--workers", word) for word in options.workers.split(",")]
    rates = [_rate("--mbit", word) for word in options.mbit.split(",")]
    methods = options.methods.split(",")
    known = {*known_methods(), LIMIT}
    for method in methods:
        require(method in known, "--methods", method, nearest(method, known))
        if method in PEERS:
            check_installed(method)
    repeats = _count("--repeats", options.repeats)
    conditions = Conditions(
        tuple(_change(word, rates) for word in options.schedule),
        tuple(_slow("--slow-link", word) for word in options.slow_link),
        tuple(_slow("--slow-cpu", word) for word in options.slow_cpu),
        pin=options.pin,
    )
    for key, slow in (("--slow-link", conditions.slow_links), ("--slow-cpu", conditions.slow_cpus)):
        for worker, _ in slow:
            hint = f"workers are counted from 0 to {min(workers) - 1}"
            require(worker < min(workers), key, worker, hint)
    check_memory(max(workers))
    # Methods take turns within a repeat, so that a noisy minute does not fall on one of them.
    order = itertools.product(range(repeats), workers, rates, methods)
    return [Trial(w, rate, method, n) for n, w, rate, method in order], conditions


def check_memory(workers: int) -> None:
    """Refuse more workers than fit into the machine's free memory.

    Raises:
        ConfigError: there are more, by a guess of 1 GiB for each.
    """
    fitting = _available_bytes() // _WORKER_BYTES
    hint = f"some {fitting} workers fit into this machine's free memory"
    require(workers <= fitting, "--workers", workers, hint)


def _count(key: str, word: object) -> int:
    text = str(word)
    require(text.isdigit() and int(text) > 0, key, word, "must be a whole number, 1 or more")
    return int(text)


def _rate(key: str, word: str) -> float | None:
    if word == "unlimited":
        return None
    rate = _number(word)
    require(rate is not None and rate > 0, key, word, "must be Mbit/s above 0, or unlimited")
    return rate


def _change(word: str, rates: Sequence[float | None]) -> Change:
    """`20@10s` is 20 Mbit/s after 10 s; `100:20@10s` the same for trials of 100 Mbit/s only."""
    hint = "must be RATE@SECONDSs or FROM:RATE@SECONDSs, as in 20@10s or 100:20@10s"
    match = re.fullmatch(r"(?:([^@:]+):)?([^@:]+)@([\d.]+)s", word)
    require(match is not None, "--schedule", word, hint)
    assert match is not None
    only_rate, mbit, seconds = match.group(1), match.group(2), _number(match.group(3))
    require(seconds is not None, "--schedule", word, hint)
    assert seconds is not None
    if only_rate is not None:
        known = [rate_name(rate) for rate in rates]
        only_rate = rate_name(_rate("--schedule", only_rate))
        hint = f"no trial has links of {only_rate}; known: {known}"
        require(only_rate in known, "--schedule", word, hint)
    return Change(seconds, _rate("--schedule", mbit), only_rate)


def _slow(key: str, word: str) -> tuple[int, float]:
    """`1:10` is worker 1 and the value 10."""
    worker, _, value = word.partition(":")
    number = _number(value)
    good = worker.isdigit() and number is not None and number > 0
    require(good, key, word, "must be WORKER:VALUE with a value above 0, as in 1:0.5")
    assert number is not None
    return int(worker), number


def _number(word: str) -> float | None:
    """The finite number that the word says, or None."""
    with contextlib.suppress(ValueError):
        value = float(word)
        if value < float("inf"):
            return value
    return None


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kib) * 1024
