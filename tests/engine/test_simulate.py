"""The simulator against closed forms by hand, and against plain loops over events."""

import csv
import itertools
import subprocess
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch

import co2
from co2.catalogue import CATALOGUE
from co2.comm.background_mean import BackgroundMean
from co2.methods import METHODS
from co2_measure.simulate import paper as paper_scaling
from co2_measure.simulate import schedule
from co2_measure.simulate.__main__ import main
from co2_measure.simulate.methods import (
    BLOCKING,
    LIMIT,
    OVERLAPPED,
    SIMULATED,
    WITH_MOMENTS,
)
from co2_measure.simulate.models import MODELS
from co2_measure.simulate.network import COLLECTIVES, Link, Network, parse_link, ring_bytes, ring_s
from co2_measure.simulate.scaling import scaling_ratio
from co2_measure.simulate.schedule import Noise, Replicas, simulate
from tests.cli.harness import ROOT

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


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_bytes_are_those_that_async_mean_counts(workers, numel):
    mean = BackgroundMean.__new__(BackgroundMean)
    mean.buffer, mean.num_replicas = torch.zeros(numel), workers
    assert ring_bytes(4 * numel, workers) == mean.bytes_per_mean()


def test_bytes_per_step():
    sent = 2 * 3 * 10**6 // 4
    assert run("none").bytes_per_step == 0
    assert run("allreduce").bytes_per_step == sent
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


@pytest.mark.parametrize("method", sorted({*BLOCKING} - {*GATHERED, *FURTHER}))
def test_a_blocking_mean_is_exposed_whole(method):
    found = run(method)
    assert found.exposed_s * 4 == pytest.approx(found.wire_s)
    assert found.step_s == pytest.approx(1 + 1.5 / 4)
    assert found.exposed_share == pytest.approx(1.5 / 5.5)
    assert found.overlap == pytest.approx(0)


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


def test_messages_are_gathered():
    # 3 phases of a message of 9,002.7 bytes, about 9 ms each
    found = run("sparseloco")
    assert found.wire_s == pytest.approx(3 * 9003e-6)
    assert found.exposed_s * 4 == pytest.approx(found.wire_s)
    assert found.bytes_per_step == 3 * 9003 / 4
    assert FLAT.all_gather_s(10**6, 4) == pytest.approx(3 * (0.008 + 0.001))


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


def test_jitter_has_the_mean_and_the_spread_asked_for():
    replicas = Replicas(200_000, 2.0, Noise(jitter=0.2))
    for steps in (1, 12):
        drawn = replicas.seconds(steps)
        assert drawn.mean() == pytest.approx(2 * steps, rel=2e-3)
        assert drawn.std() == pytest.approx(2 * 0.2 * steps**0.5, rel=1e-2)
        assert drawn.min() > 0
    again = [Replicas(5, 1.0, Noise(0.2, seed=seed)).seconds(3).tolist() for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]


def test_one_slow_replica_sets_the_pace_of_all():
    noise = Noise(slow_count=1, slowdown=1.25)
    for method in SIMULATED[1:]:
        found = run(method, noise=noise, warmup_rounds=20, network=Network(Link(1e15)))
        assert found.step_s == pytest.approx(1.25), method
        assert found.exposed_s == pytest.approx(0.25 * 3 / 4), "three wait for the fourth"
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


def test_waiting_later_is_never_slower():
    noise = Noise(jitter=0.3)
    for bits in (1e6, 1e7, 1e9):
        network = Network(Link(bits))
        late = run("co2", network=network, noise=noise).throughput
        assert late >= run("local_sgd", network=network, noise=noise).throughput


def test_the_scaling_ratio_is_the_papers():
    assert scaling_ratio(22_810, 128, 3_488, 16) == pytest.approx(22_810 / (8 * 3_488))
    assert round(scaling_ratio(22_810, 128, 3_488, 16), 2) == 0.82


@pytest.mark.parametrize("method", ["none", "allreduce", BLOCKING[0], OVERLAPPED[0]])
def test_131072_gpus_cost_no_more_python_than_16(method):
    """Replicas are elements of vectors: as many lines are executed, however many there are."""

    def lines(workers):
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            if frame.f_code.co_filename == schedule.__file__:
                count += event == "line"
                return trace
            return None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            simulate(
                method=method,
                workers=workers,
                vector_bytes=4 * MODELS["gpt2-small"].num_parameters,
                step_s=3.0,
                network=Network(parse_link("80gbps-tcp"), 8, collective="auto"),
                steps=24,
                noise=Noise(jitter=0.1, slow_share=0.01, slowdown=1.5),
            )
        finally:
            sys.settrace(before)
        return count

    assert lines(131_072) == lines(16) > 30


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
    [
        ("20mbit", 20e6, 0),
        ("1gbit@50us", 1e9, 50e-6),
        ("1.5Gbps@2ms", 1.5e9, 2e-3),
        ("80gbps-tcp", 80e9, 50e-6),
        ("800gbps-rdma@0s", 800e9, 0),
    ],
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


def test_the_table_of_the_paper(capsys, tmp_path):
    assert main(["--paper", "--csv", str(tmp_path / "a.csv")]) == 0
    shown = capsys.readouterr().out
    assert "304,736" in shown and "calibrated" in shown and "Simulated, not measured" in shown
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [float(row["paper"]) for row in rows] == list(paper_scaling.PAPER.values())


def test_the_command_line(capsys, tmp_path):
    table, page = tmp_path / "deep" / "a.csv", tmp_path / "a.md"
    words = "--gpus 8..32,96 --method none,allreduce,co2 --tau 4,12 --link 80gbps-tcp,1gbit@1ms"
    assert main([*words.split(), "--csv", str(table), "--markdown", str(page)]) == 0
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 2 * 4 * 4, "2 links, 4 numbers of GPUs, co2 with two τ"
    assert [row["gpus"] for row in rows[:4]] == ["8", "16", "32", "96"]
    assert {float(row["of_limit"]) for row in rows if row["method"] == "none"} == {1}
    assert {float(row["scaling_ratio"]) for row in rows if row["gpus"] == "16"} == {1}
    assert "python -m co2.simulate --gpus 8..32,96" in page.read_text()
    assert "exposed_share" in capsys.readouterr().out


def test_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["--gpus", "8..64", "--figure", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("--gpus=0", "--gpus=0: must be a whole number"),
        ("--gpus=64..8", "--gpus=64..8: must end"),
        ("--gpus=12", "--gpus=12: must fill servers of 8"),
        ("--gpus=1e3", "--gpus=1e3: must be"),
        ("--gpus=99999999999", "--gpus=99999999999: must be"),
        ("--base-gpus=9", "--base-gpus=9: must fill"),
        ("--model=gpt2-smal", "--model=gpt2-smal: did you mean gpt2-small?"),
        ("--method=co3", "--method=co3: "),
        ("--method=onebit_adam", "--method=onebit_adam: is not simulated, because what it sends"),
        ("--method=,", "--method=,: must name"),
        ("--tau=0", "--tau=0: must be"),
        ("--link=fast", "--link=fast: must be a rate"),
        ("--link=0mbit", "--link=0mbit: must be a rate"),
        ("--link=1gbit@soon", "--link=1gbit@soon: must have a latency"),
        ("--inside=x", "--inside=x: must be a rate"),
        ("--efficiency=0", "--efficiency=0.0: must be"),
        ("--mfu=2", "--mfu=2: must be"),
        ("--step-time=nan", "--step-time=nan: must be"),
        ("--units=many", "--units=many: must be"),
        ("--bucket-mb=0", "--bucket-mb=0.0: must be"),
        ("--backward-share=1.5", "--backward-share=1.5: must be"),
        ("--jitter=-1", "--jitter=-1.0: must be"),
        ("--stragglers=101%", "--stragglers=101: must be"),
        ("--slowdown=0.5", "--slowdown=0.5: must be"),
        ("--gpu=tpu", "--gpu=tpu: "),
        ("--wire=fp8", "--wire=fp8: "),
        ("--csv=/dev/null/a.csv", "--csv=/dev/null/a.csv: cannot be written"),
        ("--figure=/dev/null/a.svg", "--figure=/dev/null/a.svg: cannot be written"),
        ("--figure=a.doc", "--figure=a.doc: must end in one of"),
        ("--paper --figure=a.svg", "--figure=a.svg: is not drawn with --paper"),
    ],
)
def test_a_bad_value_is_one_line(words, start, capsys):
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {start}") and shown.err.count("\n") == 1
    assert shown.out == ""


def test_an_unknown_flag_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--gpuz=8"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
