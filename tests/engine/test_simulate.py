"""The simulator against closed forms by hand, and against plain loops over events; goodput where
nodes fail; and the benchmark that holds the simulator against the laboratory."""

import csv
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import co2
from benchmarks.simulator import PAYLOAD_SHARE, points
from co2.catalogue import CATALOGUE
from co2.errors import ConfigError
from co2.methods import METHODS
from co2_measure.simulate import paper as paper_scaling
from co2_measure.simulate.__main__ import main
from co2_measure.simulate.drawn import drawn_goodput
from co2_measure.simulate.failures import (
    DISCARD,
    ELASTIC,
    LLAMA_MTBF_HOURS,
    RESTART,
    WAYS,
    Faults,
    Round,
    daly_s,
    goodput,
    restart_goodput,
)
from co2_measure.simulate.goodput import ways
from co2_measure.simulate.methods import (
    BLOCKING,
    LIMIT,
    OVERLAPPED,
    SIMULATED,
    WITH_FRAGMENTS,
    WITH_MOMENTS,
)
from co2_measure.simulate.network import COLLECTIVES, Link, Network, parse_link, ring_s
from co2_measure.simulate.scaling import scaling_ratio
from co2_measure.simulate.schedule import Noise, Replicas, simulate
from tests.cli.harness import ROOT
from tests.grids import grid

LINK = Link(1e9, 1e-3)
FLAT = Network(LINK)
SLOW = Network(Link(8e6))  # a megabyte takes a second
WHOLE = 10**12
GATHERED = [name for name, entry in CATALOGUE.items() if entry.exchange == "gather"]
FURTHER = [name for name, entry in CATALOGUE.items() if entry.further]


def run(method, **changed):
    """4 workers, a ring of 1.5 s on SLOW, steps of 1 s, rounds of 4, settled."""
    given = {
        "workers": 4,
        "vector_bytes": 10**6,
        "step_s": 1.0,
        "network": SLOW,
        "steps": 40,
        "tau": 4,
        "warmup_rounds": 2,
        "bucket_bytes": WHOLE,
    }
    return simulate(method=method, **(given | changed))


def test_a_ring_by_hand():
    # 4 workers, 8 Mbit: 6 phases of 2 Mbit at 1 Gbit/s and 1 ms each.
    assert ring_s(10**6, 4, LINK) == pytest.approx(6 * (0.002 + 0.001))
    assert FLAT.all_reduce_s(10**6, 4) == ring_s(10**6, 4, LINK)
    assert FLAT.all_reduce_s(10**6, 1) == 0
    assert FLAT.all_gather_s(10**6, 4) == pytest.approx(3 * (0.008 + 0.001)), "3 whole messages"
    halved = Network(replace(LINK, efficiency=0.5))
    assert halved.all_reduce_s(10**6, 4) == pytest.approx(6 * (0.004 + 0.001))


def test_servers_by_hand():
    inside = Link(1e11, 1e-5)
    # 2 servers of 4: inside 6 phases of n/4, across 2 phases of n/2.
    inner, outer = 6 * (8e6 / 4 / 1e11 + 1e-5), 2 * (8e6 / 2 / 1e9 + 1e-3)
    expected = {
        "ring": 14 * (8e6 / 8 / 1e9 + 1e-3),
        "hierarchical": inner + outer,
        "tree": inner + 2 * 8e6 / 1e9 + 2 * 1e-3,
    }
    expected["auto"] = min(expected.values())
    for collective in COLLECTIVES:
        network = Network(LINK, 4, inside, collective)
        assert network.all_reduce_s(10**6, 8) == pytest.approx(expected[collective])
        assert network.all_reduce_s(10**6, 4) == pytest.approx(inner), "one server: no link"


def test_bytes_per_step():
    sent = 2 * 3 * 10**6 // 4
    assert run("none").bytes_per_step == 0
    assert run("allreduce").bytes_per_step == sent
    assert run("sparseloco").bytes_per_step == 3 * 9003 / 4, "3 messages of 9,002.7 bytes"
    for method in {*BLOCKING, *OVERLAPPED} - {*GATHERED, *FURTHER}:
        assert run(method).bytes_per_step == sent / 4
        assert run(method, steps=43).bytes_per_step == sent * 10 / 43, "no collective in the rest"


@pytest.mark.parametrize("method", OVERLAPPED)
def test_a_late_mean_is_hidden_below_a_round_and_exposed_above(method):
    hidden = run(method)
    assert hidden.exposed_s == 0 and hidden.step_s == 1 and hidden.overlap == 1
    assert hidden.comm_s == hidden.wire_s == pytest.approx(1.5)
    twice = run(method, vector_bytes=5_333_333)  # 8 s of wire, 4 of computation
    assert twice.wire_s == pytest.approx(8, abs=1e-5)
    assert twice.exposed_s * 4 == pytest.approx(twice.wire_s - 4), "exactly comm − τ·step a round"
    assert twice.step_s == pytest.approx(twice.wire_s / 4)
    assert twice.overlap == pytest.approx(4 / twice.wire_s)
    start = run(method, vector_bytes=5_333_333, warmup_rounds=0)
    assert start.exposed_s * 40 == pytest.approx(9 * (twice.wire_s - 4)), "none in round 0"


def test_one_replica_is_never_exposed():
    found = run("allreduce", workers=1, bucket_bytes=10**5)  # -3e-16 s where clocks round
    assert found.exposed_s == 0 and found.exposed_share == 0


def test_des_loc_averages_moments_in_rounds_of_their_own():
    # 12 rounds: 12 means of the weights, 4 of m, 2 of v, each 1.5 s
    found = run("desloc", steps=48, warmup_rounds=0)
    assert found.bytes_per_step == 18 * (2 * 3 * 10**6 // 4) / 48
    assert found.exposed_s * 48 == pytest.approx(18 * 1.5)
    assert found.wire_s == pytest.approx(1.5 * 1.5)
    assert run("desloc", steps=8, warmup_rounds=0).step_s == run("local_sgd", steps=8).step_s


@pytest.mark.parametrize("method", FURTHER)
def test_the_periods_of_moments_are_the_defaults(method):
    config = METHODS[method].Config()
    periods = config.first_moment_every / config.tau, config.second_moment_every / config.tau
    assert CATALOGUE[method].further == periods


@pytest.mark.parametrize("method", SIMULATED)
def test_averaged_moments_are_two_further_vectors(method):
    plain, averaged = run(method), run(method, average_moments=True)
    has = method in WITH_MOMENTS
    assert averaged.bytes_per_step == plain.bytes_per_step * (3 if has else 1)
    # 4.5 s on the wire: an overlapped round of 4 s hides all but half a second
    exposed = {True: 4.5, False: 0.5}[method in BLOCKING]
    assert averaged.exposed_s == pytest.approx(exposed / 4 if has else plain.exposed_s)


def test_the_share_of_a_message_is_the_methods():
    """With its default configuration, for a model of many whole chunks."""
    weight = torch.nn.Parameter(torch.zeros(4096, 10))
    synchronized = METHODS["sparseloco"]()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    synchronized.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    message = synchronized.exchange.messages()["sent"]
    share = CATALOGUE["sparseloco"].share
    assert message.nbytes == pytest.approx(share * 4 * weight.numel(), rel=1e-3)


@pytest.mark.parametrize("buckets", [1, 2, 10, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("step_s", [0.1, 1.0, 2.0, 10.0])
def test_allreduce_hides_all_but_the_last_bucket(buckets, share, step_s):
    found = run("allreduce", bucket_bytes=10**6 // buckets, backward_share=share, step_s=step_s)
    window = share * step_s
    exposed = max(1.5 / buckets, 1.5 - window * (buckets - 1) / buckets)
    assert found.exposed_s == pytest.approx(exposed)
    assert found.step_s == pytest.approx(step_s + exposed)
    if buckets == 1000:
        assert exposed == pytest.approx(max(0, 1.5 - window), abs=0.011)


def test_none_is_the_limit():
    found = run("none", units_per_step=3)
    assert found.throughput == pytest.approx(4 * 3)
    assert found.comm_s == found.exposed_s == 0 and found.overlap is None


@pytest.mark.parametrize("method", sorted({*OVERLAPPED} & {*WITH_FRAGMENTS}))
def test_fragments_send_as_much_and_each_has_a_latency(method):
    """6 phases of 0.2 s beside 1.5 s of bytes: 2.7 s of 4 as a whole, 1.575 s of 1 in four parts.
    Of three parts two have one step and one has two."""
    late = Network(Link(8e6, 0.2))
    whole, cut = run(method, network=late), run(method, network=late, fragments=4)
    assert whole.exposed_s == 0 and cut.exposed_s == pytest.approx(0.575)
    assert (cut.wire_s, cut.comm_s) == pytest.approx((1.575, 1.575))
    assert cut.bytes_per_step == whole.bytes_per_step
    assert run(method, fragments=4).exposed_s == 0, "without latency"
    uneven = run(method, vector_bytes=3 * 10**6, fragments=3)
    assert uneven.exposed_s * 4 == pytest.approx(2 * 0.5), "1.5 s each"
    with pytest.raises(ConfigError, match=r"^fragments=5: must be 1 to tau, which is 4$"):
        run(method, fragments=5)


@pytest.mark.parametrize("method", sorted({*OVERLAPPED} & {*WITH_FRAGMENTS}))
def test_fragments_under_way_together_wait_for_no_short_round(method):
    """1.2 s each, of three of which two have one step and one has two: 3.6 s of 4."""
    for delay, exposed_s in ((None, 0.4), (1, 0.4), (2, 0.4), (3, 0.0)):
        found = run(method, vector_bytes=2_400_000, fragments=3, delay=delay)
        assert found.exposed_s * 4 == pytest.approx(exposed_s), delay
        assert found.bytes_per_step == run(method, vector_bytes=2_400_000).bytes_per_step
    assert run(method, delay=1) == run(method), "of the whole model it is left out"


def test_other_methods_have_no_fragments():
    for method in {*SIMULATED} - {*WITH_FRAGMENTS}:
        assert run(method, fragments=4) == run(method)


def events(method, seconds, wire_s, tau, steps, shares, backward_share):
    """Clocks and exposed seconds of every replica at the end: loops, one event at a time."""
    workers = len(seconds[0])
    clock, exposed = [0.0] * workers, [0.0] * workers
    pending = None  # the launches of the collective in flight
    network_free = 0.0
    for number, durations in enumerate(seconds, start=1):
        own_wire_s = wire_s * CATALOGUE[method].vectors_in(number)
        end = [clock[i] + durations[i] for i in range(workers)]
        if method == "allreduce":
            passed = 0.0
            for share in shares:
                passed += share
                ready = [
                    clock[i] + durations[i] * (1 - backward_share + backward_share * passed)
                    for i in range(workers)
                ]
                network_free = max([network_free, *ready]) + wire_s * share
            resumed = [max(end[i], network_free) for i in range(workers)]
        elif method in BLOCKING:
            network_free = max([network_free, *end]) + own_wire_s
            resumed = [max(end[i], network_free) for i in range(workers)]
        else:
            if pending is not None:
                network_free = max([network_free, *pending]) + wire_s
            resumed = [max(end[i], network_free) for i in range(workers)]
            pending = resumed
        for i in range(workers):
            exposed[i] += resumed[i] - end[i]
            clock[i] = resumed[i]
    return clock, exposed


@pytest.mark.parametrize("method", ["allreduce", *BLOCKING, *OVERLAPPED])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("megabytes", [0.01, 1, 4])
def test_the_vector_against_loops_over_events(method, workers, megabytes):
    noise = Noise(jitter=0.3, slow_count=1, slowdown=1.4, seed=7)
    tau, rounds, num_buckets = 3, 20, 4
    length = 1 if method == "allreduce" else tau
    replicas = Replicas(workers, 1.0, noise)
    seconds = [replicas.seconds(length).tolist() for _ in range(rounds)]
    size = int(megabytes * 10**6)
    shares = [1 / num_buckets] * num_buckets
    wire_s = SLOW.all_reduce_s(size, workers)
    if method in GATHERED:
        wire_s = SLOW.all_gather_s(round(CATALOGUE[method].share * size), workers)
    clock, exposed = events(method, seconds, wire_s, tau, rounds, shares, 0.6)
    found = simulate(
        method=method,
        workers=workers,
        vector_bytes=size,
        step_s=1.0,
        network=SLOW,
        steps=rounds * length,
        tau=tau,
        bucket_bytes=size // num_buckets,
        backward_share=0.6,
        noise=noise,
    )
    vectors = sum(CATALOGUE[method].vectors_in(number) for number in range(1, rounds + 1))
    assert found.wire_s == pytest.approx(wire_s * vectors / rounds)
    assert found.exposed_s * rounds * length == pytest.approx(sum(exposed) / workers)
    assert found.step_s * rounds * length == pytest.approx(sum(clock) / workers)
    assert found.throughput == pytest.approx(sum(rounds * length / own for own in clock))
    assert found.exposed_share == pytest.approx(sum(exposed) / sum(clock))
    if method in BLOCKING and workers > 1:
        assert found.overlap == pytest.approx(0)


def test_jitter_has_the_mean_and_the_spread_asked_for():
    replicas = Replicas(200_000, 2.0, Noise(jitter=0.2))
    for steps in (1, 12):
        drawn = replicas.seconds(steps)
        assert drawn.mean() == pytest.approx(2 * steps, rel=2e-3)
        assert drawn.std() == pytest.approx(2 * 0.2 * steps**0.5, rel=1e-2)
        assert drawn.min() > 0
    again = [Replicas(5, 1.0, Noise(0.2, seed=seed)).seconds(3).tolist() for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    assert Noise(slow_share=0.01).num_slow(250) == 3


@pytest.mark.parametrize("method", SIMULATED)
def test_better_networks_and_longer_rounds_never_hurt(method):
    for noise in (Noise(), Noise(jitter=0.2, slow_count=1, slowdown=1.2)):
        slower = [
            run(method, network=Network(Link(rate, 1e-3)), noise=noise).throughput
            for rate in (1e5, 1e6, 1e7, 1e8, 1e12)
        ]
        assert slower == sorted(slower)
        late = [
            run(method, network=Network(Link(1e9, latency)), noise=noise).throughput
            for latency in (10, 1, 0.1, 0)
        ]
        assert late == sorted(late)
    by_tau = [run(method, tau=tau, steps=48).throughput for tau in (1, 2, 4, 12, 24)]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(by_tau))


def test_the_scaling_ratio_is_the_papers():
    assert scaling_ratio(22_810, 128, 3_488, 16) == pytest.approx(22_810 / (8 * 3_488))
    assert round(scaling_ratio(22_810, 128, 3_488, 16), 2) == 0.82


def test_every_method_of_the_suite_is_simulated_or_left_out_with_a_reason():
    left_out = {name for name, entry in CATALOGUE.items() if entry.not_simulated}
    assert sorted(SIMULATED) == sorted({LIMIT, *CATALOGUE} - left_out)
    assert {"local_sgd", "slowmo", "diloco"} <= {*BLOCKING} and {"co2", "co2_keep"} <= {*OVERLAPPED}


ALONE = """
import importlib, pkgutil, sys
for name in ("torch", "rich", "matplotlib"):
    sys.modules[name] = None  # importing it is an error
import co2_measure.simulate
for module in pkgutil.iter_modules(co2_measure.simulate.__path__, "co2_measure.simulate."):
    importlib.import_module(module.name)
from co2_measure.simulate.network import Link, Network
from co2_measure.simulate.schedule import simulate
network = Network(Link(1e9))
print(simulate(method="co2", workers=8, vector_bytes=8, step_s=1, network=network, steps=12).step_s)
"""


def test_the_simulator_needs_no_torch():
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr


@pytest.mark.parametrize(
    ("text", "rate_bits", "latency_s"),
    [("20mbit", 20e6, 0), ("1.5Gbps@2ms", 1.5e9, 2e-3), ("80gbps-tcp", 80e9, 50e-6)],
)
def test_links_by_name_or_rate(text, rate_bits, latency_s):
    link = parse_link(text)
    assert (link.rate_bits, link.latency_s) == pytest.approx((rate_bits, latency_s))


def test_the_papers_figures_and_what_was_fitted():
    head, *rest = paper_scaling.settings()
    values = [setting.figures() for setting in (head, *rest)]
    for setting, found in zip((head, *rest), values, strict=True):
        assert list(found) == list(paper_scaling.PAPER)
        assert not any("CO2" in name for name in setting.fitted)
        for name in setting.fitted:
            assert found[name] == pytest.approx(paper_scaling.PAPER[name], rel=5e-3), name
    assert rest[-1].network.link.latency_s > 0


def test_the_command_line(capsys, tmp_path):
    table, page, figure = tmp_path / "deep" / "a.csv", tmp_path / "a.md", tmp_path / "a.svg"
    words = "--gpus 8..32,96 --method none,allreduce,co2 --tau 4,12 --link 80gbps-tcp,1gbit@1ms"
    files = ["--csv", str(table), "--markdown", str(page), "--figure", str(figure)]
    assert main([*words.split(), *files]) == 0
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 2 * 4 * 4, "2 links, 4 numbers of GPUs, co2 with two τ"
    assert [row["gpus"] for row in rows[:4]] == ["8", "16", "32", "96"]
    assert {float(row["of_limit"]) for row in rows if row["method"] == "none"} == {1}
    assert {float(row["scaling_ratio"]) for row in rows if row["gpus"] == "16"} == {1}
    assert "python -m co2.simulate --gpus 8..32,96" in page.read_text()
    assert "exposed_share" in capsys.readouterr().out and figure.stat().st_size > 1000
    assert main(["--paper", "--csv", str(table)]) == 0
    assert "Simulated, not measured" in capsys.readouterr().out
    rows = list(csv.DictReader(table.open()))
    assert [float(row["paper"]) for row in rows] == list(paper_scaling.PAPER.values())


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("--gpus=64..8", "--gpus=64..8: must end"),
        ("--gpus=12", "--gpus=12: must fill servers of 8"),
        ("--gpus=99999999999", "--gpus=99999999999: must be"),
        ("--model=gpt2-smal", "--model=gpt2-smal: did you mean gpt2-small?"),
        ("--method=onebit_adam", "--method=onebit_adam: is not simulated, because what it sends"),
        ("--method=,", "--method=,: must name"),
        ("--fragments=13", "--fragments=13: must be at most --tau, which is 12"),
        ("--delay=3", "--delay=3: is of a fragment's mean"),
        ("--link=0mbit", "--link=0mbit: must be a rate"),
        ("--link=1gbit@soon", "--link=1gbit@soon: must have a latency"),
        ("--step-time=nan", "--step-time=nan: must be"),
        ("--jitter=-1", "--jitter=-1.0: must be"),
        ("--stragglers=101%", "--stragglers=101: must be"),
        ("--csv=/dev/null/a.csv", "--csv=/dev/null/a.csv: cannot be written"),
        ("--figure=a.doc", "--figure=a.doc: must end in one of"),
        ("--paper --figure=a.svg", "--figure=a.svg: is not drawn with --paper"),
        ("--goodput --method=none", "--method=none: has no means"),
        ("--goodput --paper", "--goodput=true: is not simulated with --paper"),
        ("--mtbf-hours=inf", "--mtbf-hours=inf: must be"),
        ("--restart-s=soon", "--restart-s=soon: must be"),
        ("--checkpoint-s=0", "--checkpoint-s=0.0: must be"),
        ("--failures=0", "--failures=0: must be"),
    ],
)
def test_a_bad_value_is_one_line(words, start, capsys):
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {start}") and shown.err.count("\n") == 1
    assert shown.out == ""


ROUND = Round(10.0, mean_s=0.5, state_s=2.0)
FAULTS = Faults(3e4, repair_s=20, restart_s=5, detect_s=3, regroup_s=1, checkpoint_s=2)
RARE_S = 1e14
by_way = pytest.mark.parametrize("way", WAYS)


@by_way
@pytest.mark.parametrize("nodes", [2, 16, 16_384])
def test_without_failures_nothing_is_lost(way: str, nodes: int) -> None:
    never = replace(FAULTS, mtbf_s=RARE_S * nodes)
    assert goodput(way, never, nodes, ROUND) == pytest.approx(1, abs=1e-6)
    assert drawn_goodput(way, never, nodes, ROUND, 10) == pytest.approx(1, abs=1e-6)


@by_way
@pytest.mark.parametrize("nodes", [4, 64, 1024])
@pytest.mark.parametrize("rounds", grid([3, 10, 100, 10_000], (3, 100).__contains__))
@pytest.mark.parametrize(
    ("repair_s", "detect_s"), [(0.0, 3.0), (25.0, 3.0), (400.0, 3.0), (25.0, 12.0)]
)
def test_closed_forms_against_drawn_failures(
    way: str, nodes: int, rounds: int, repair_s: float, detect_s: float
) -> None:
    """One failure in 10,000 rounds, up to one in three."""
    mtbf_s = nodes * rounds * ROUND.seconds
    faults = replace(FAULTS, mtbf_s=mtbf_s, repair_s=repair_s, restart_s=0.0, detect_s=detect_s)
    drawn = drawn_goodput(way, faults, nodes, ROUND, 10_000, seed=1)
    closed = goodput(way, faults, nodes, ROUND)
    assert closed == pytest.approx(drawn, abs=0.02)
    lost = max(1 - drawn, 1e-6)
    if lost < 0.1:
        assert 1 - closed == pytest.approx(lost, rel=0.06)


def test_what_is_counted_is_settled() -> None:
    """A thousand nodes fail once in 1,000 s and are away for as long: half of them are there, even
    if few failures are drawn."""
    faults = Faults(1e3, repair_s=1e3)
    assert drawn_goodput(ELASTIC, faults, 1000, Round(1.0), 100) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("ratio", [1e-3, 1e-4, 1e-6])
def test_restart_at_the_optimum_is_the_known_approximation(ratio: float) -> None:
    """1 − √(2δ/M), for small δ/M and without a downtime; terms of the order δ/M are left out."""
    faults = Faults(1e6, checkpoint_s=1e6 * ratio)
    assert restart_goodput(faults, 1) == pytest.approx(1 - math.sqrt(2 * ratio), abs=2 * ratio)
    assert daly_s(1e6 * ratio, 1e6) == pytest.approx(1e6 * math.sqrt(2 * ratio), rel=ratio**0.5)


@pytest.mark.parametrize("checkpoint_s", [0.1, 10.0, 300.0])
@pytest.mark.parametrize("nodes", [1, 100])
def test_no_interval_is_much_better_than_dalys(checkpoint_s: float, nodes: int) -> None:
    faults = replace(FAULTS, checkpoint_s=checkpoint_s)
    optimum_s = faults.interval_s(nodes)
    chosen = restart_goodput(faults, nodes)
    for factor in np.geomspace(0.1, 10, 41):
        other = replace(faults, checkpoint_every_s=float(optimum_s * factor))
        assert restart_goodput(other, nodes) <= chosen * (1 + 2e-3)
    for factor in (0.5, 2):
        other = replace(faults, checkpoint_every_s=optimum_s * factor)
        assert restart_goodput(other, nodes) < chosen
    assert daly_s(5.0, 2.0) == 2.0, "no time for more"


def test_the_default_is_llama_3s() -> None:
    """419 failures in 54 days, of 2,048 nodes."""
    days = LLAMA_MTBF_HOURS / 24
    assert days / 2048 * 419 == pytest.approx(54)
    assert days == pytest.approx(263.9, abs=0.1)


def test_which_methods_can_be_elastic() -> None:
    for method in (*BLOCKING, *OVERLAPPED):
        assert (ELASTIC in ways(method, 2)) == CATALOGUE[method].elastic
        assert ways(method, 1) == (RESTART,)
    assert ways("allreduce", 2) == ways("acco", 2) == (RESTART, DISCARD)


def test_goodput_by_the_command_line(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    words = "--goodput --gpus 8,1024,131072 --method allreduce,sparseloco,co2 --tau 4,48"
    assert main([*words.split(), "--failures=100", f"--csv={table}"]) == 0
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 3 * (1 + 2 + 2)
    for row in rows:
        alone = row["gpus"] == "8"
        assert (row["discard"] == "") == alone
        assert (row["elastic"] == "") == (alone or row["method"] != "co2")
        for way in WAYS:
            assert (row[way] == "") == (row[f"{way}_drawn"] == "")
            if row[way]:
                assert 0 < float(row[way]) < 1
                assert float(row[way]) == pytest.approx(float(row[f"{way}_drawn"]), abs=0.05)
    for before, after in itertools.pairwise(rows[:3]):
        assert float(before["restart"]) > float(after["restart"])


STEPS, STEP_S, VECTOR_BYTES = 60, 0.1, 4_000_000


def cell(method: str, mbit: str, workers: int = 2, slower: float = 1.0) -> dict[str, str]:
    """What the laboratory would write if the simulator were right: the first step is not timed."""
    rate = 1e12 if mbit == "unlimited" else float(mbit) * 1e6
    found = simulate(
        method=method,
        workers=workers,
        vector_bytes=VECTOR_BYTES,
        step_s=STEP_S,
        network=Network(Link(rate, efficiency=PAYLOAD_SHARE)),
        steps=STEPS,
        tau=12,
    )
    first_s = found.step_s if method == "allreduce" else STEP_S
    train_s = (found.step_s * STEPS - first_s) * slower
    return {
        "workers": str(workers),
        "mbit": mbit,
        "method": method,
        "throughput": str(workers * 8 * (STEPS - 1) / train_s),
        "train_s": str(train_s),
        "steps": str(STEPS),
        "bytes_per_step": str(found.bytes_per_step),
    }


def test_a_right_simulator_has_no_error() -> None:
    cells = [
        cell(method, mbit, workers)
        for workers in (2, 3, 4)
        for mbit in ("5", "50", "unlimited")
        for method in SIMULATED
    ]
    found = points(cells, tau=12)
    assert len(found) == 3 * 2 * (len(SIMULATED) - 1)
    for point in found:
        assert point.error == pytest.approx(0, abs=1e-6), point


def test_an_error_shows() -> None:
    """And a method that is not simulated is left out."""
    cells = [cell("none", "50"), cell("allreduce", "50"), cell("co2", "50", slower=1.1)]
    cells.append({**cells[1], "method": "torchft_diloco"})
    errors = {point.method: point.error for point in points(cells, tau=12)}
    assert errors == {
        "allreduce": pytest.approx(0, abs=1e-6),
        "co2": pytest.approx(0.1),
    }
