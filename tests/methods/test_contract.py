"""What every method keeps, whatever it does: a method is covered by being in the registry.

It follows its simulation in one process on 1 to 4 replicas, and would not if nothing were
exchanged; a consensus shows the mean of what was trained and leaves no trace; a training that stops
anywhere goes on to the last bit; and what is equal on all replicas is said to be. What a method
cannot do is in test_declared.py.

Every case runs on three replicas, where a mean has to be rounded. What one replica does
differently, or four, no setting of a method changes: one case of each method runs there, and with
another inner optimizer on two, where `make test-slow` has all cases.
"""

import copy
import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from enum import Enum
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from co2.comm.runners import HostRunner
from co2.config import CommConfig, Precision
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.base import BF16
from tests.grids import OF_A_KIND, grid, nonempty
from tests.methods.driver import (
    CASES,
    MOMENTS,
    OVERLAPPED,
    ROUNDS_OF,
    SETTINGS,
    SHARDED,
    TELLING,
    WITH_MOMENTS,
    Case,
    Session,
    Snapshot,
    assert_same,
    inner,
    inner_of,
    reference_of,
    replicas_of,
    simulate,
    trajectory,
)
from tests.methods.network import SlowNetwork, nothing_exchanged
from tests.reference import REFERENCES
from tests.workers import Pool, everybody, replicas

TAU = 3
STEPS = 5 * TAU
CO2_IN_PARTS = SHARDED[0]


def test_every_method_has_settings_and_a_reference() -> None:
    assert SETTINGS.keys() == REFERENCES.keys() == METHODS.keys()


# The reference.


def assert_follows(
    measured: list[list[Snapshot]],
    case: Case,
    optimizer: str,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
) -> None:
    """Hold histories, one of each replica, against the method's reference."""
    expected = simulate(case, optimizer, len(measured), dtype)
    for history, simulated in zip(measured, expected, strict=True):
        per_round = STEPS // (len(simulated) - 1)
        for index, (now, then) in enumerate(zip(history[::per_round], simulated, strict=True)):
            torch.testing.assert_close(
                now,
                then,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, index=index: f"after round {index}: {text}",
            )


Run = tuple[Case, int, str, torch.dtype]
"""A case, how many replicas, the inner optimizer, and the type of the weights."""
WITHOUT_MOMENTS = [*CASES, *SHARDED]
RUNS: list[Run] = [(case, 3, inner(case[0]), torch.float64) for case in WITHOUT_MOMENTS]
RUNS += [(case, 3, "adamw", torch.float64) for case in WITH_MOMENTS]
RUNS += [(case, world, inner_of(case), torch.float64) for case in TELLING for world in (1, 4)]
RUNS += [(case, 2, inner(case[0], "adamw"), torch.float64) for case in TELLING]
RUNS += [(case, 3, inner(case[0]), torch.float32) for case in TELLING]
FRAGMENTS: Case = ("co2_keep", {**SETTINGS["co2_keep"], "fragments": 3})
RUNS += [(FRAGMENTS, world, "adamw", torch.float64) for world in (1, 2, 4)]
RUNS.append((FRAGMENTS, 3, "sgd", torch.float32))


def is_telling(one: Run) -> bool:
    """Of CO2's gaps, clips and beginnings those pairs that `SHARDED` has, too."""
    case, world, optimizer, dtype = one
    if case[0] == "co2" and case not in (*TELLING, *WITH_MOMENTS):
        return ("co2", {**case[1], "shard": True}) in SHARDED
    usual = (3, inner(case[0]), torch.float64)
    undone = (case[0], optimizer) == ("acco", "adamw")  # every other step of AdamW is taken back
    return (
        case in WITH_MOMENTS or (world, optimizer, dtype) == usual or case[0] in OF_A_KIND or undone
    )


@pytest.mark.parametrize(("case", "world", "optimizer", "dtype"), grid(RUNS, is_telling), ids=str)
def test_equals_reference(
    workers: Pool, case: Case, world: int, optimizer: str, dtype: torch.dtype
) -> None:
    measured = workers.run(trajectory, world, *case, optimizer, dtype, STEPS)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    assert_follows(measured, case, optimizer, dtype, tolerance)


@pytest.mark.slow  # it is about the problem and the cases, which rarely change
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_choice_shows(optimizer: str) -> None:
    """Were two configurations alike on this problem, the tests above could not tell them apart."""
    ends = []
    for case in CASES + (WITH_MOMENTS if optimizer == "adamw" else []):
        [(*_, end), _] = simulate(case, inner(case[0], optimizer), 2)
        ends.append(
            torch.cat([end[key].reshape(-1) for key in ("scale", "leave.bias", "leave.weight")])
        )
    for i, j in product(range(len(ends)), repeat=2):
        assert i == j or (ends[i] - ends[j]).abs().max() > 1e-5, (i, j)


# Were synchronization replaced by nothing.


FIRST_MEANS: list[Case] = [
    *((name, SETTINGS[name]) for name in ROUNDS_OF),
    ("co2_keep", {"tau": 3, "fragments": 1, "delay": 1}),
    *(
        ("co2_keep", {"tau": 5, "fragments": 3, **late})
        for late in ({}, {"delay": 0}, {"delay": 5})
    ),
    ("streaming_diloco", {"tau": 6, "delay": 4}),
    *(("sparta", {"share": 0.4, "delay": delay}) for delay in (0, 1, 3)),
]


@replicas(2)
@pytest.mark.parametrize(
    "case", [*FIRST_MEANS, *(case for case in TELLING if case not in FIRST_MEANS)], ids=str
)
def test_without_an_exchange_a_replica_is_another(rank: int, case: Case) -> None:
    """From the step on in which the method says that the first mean arrives, and by more than it
    may differ from its reference."""
    histories = []
    for way in (nothing_exchanged, nullcontext):
        session = Session(rank, *case, inner(case[0]))
        history = [session.snapshot()]  # equal weights, which `prepare` has brought
        with way(session.model):
            for _ in range(4 * TAU):
                session.step()
                history.append(session.snapshot())
            session.method.flush()
        histories.append(history)
    pairs = list(zip(*histories, strict=True))
    alike = [all(torch.equal(one[key], other[key]) for key in one) for one, other in pairs]
    first = alike.index(False)
    firsts = session.method.first_means().values() if case in FIRST_MEANS else [first]
    assert first == min(firsts) > 0
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(*pairs[-1], rtol=1e-6, atol=1e-6)


# One replica alone.


@pytest.mark.parametrize("name", SETTINGS)
def test_alone_it_needs_no_process_group_and_sends_nothing(workers: Pool, name: str) -> None:
    assert not dist.is_initialized()
    [expected] = workers.run(trajectory, 1, name, SETTINGS[name], None, torch.float64, LOOKS)
    session = Session(0, name, SETTINGS[name], total=LOOKS)
    for step, snapshot in enumerate(expected):
        if step:
            session.step()
        assert_same(session.snapshot(), snapshot)
        shown = session.shown()
        if step % TAU:  # amid a round
            assert_same(shown, snapshot)
        stats = session.method.stats()
        assert stats.bytes_sent == 0
        assert all(type(value) is float for value in dataclasses.astuple(stats)[:3])
        assert all(type(value) is float for value in stats.own.values())
    assert not dist.is_initialized()


# Consensus and flush.

RESTARTS: list[Case] = [
    *((name, SETTINGS[name]) for name in ("co2", "co2_keep", "overlap_local_sgd")),
    CO2_IN_PARTS,
    ("co2_keep", {**SETTINGS["co2_keep"], "delay": 1}),
    FRAGMENTS,
]
"""Those whose rounds start from a point that misses the one before."""
LOOKS = 3 * TAU
Looked = tuple[Snapshot, Snapshot, Snapshot]
"""Before, inside and after a consensus."""


def looked_at(rank: int, world: int, case: Case, comm: CommConfig | None = None) -> list[Looked]:
    """At the start and after each step; an error inside is no harm, and flush changes no weight,
    whenever it comes."""
    session = Session(rank, *case, inner_of(case), comm=comm, total=LOOKS)
    history = []
    for step in range(LOOKS + 1):
        if step:
            session.step()
        before, inside = session.snapshot(), session.shown()
        with suppress(ZeroDivisionError), session.method.consensus():
            raise ZeroDivisionError
        history.append((before, inside, session.snapshot()))
    for _ in range(2):
        session.method.flush()
        assert_same(session.snapshot(), before)
    if case[1].get("tau") == TAU:
        torch.testing.assert_close(session.shown(), inside, rtol=1e-12, atol=1e-12)
    return history


def mean_of(runs: list[list[Looked]], step: int) -> Snapshot:
    """The replicas' mean of what they held after a step; of integers, the first replica's."""
    befores = [run[step][0] for run in runs]
    return {
        key: torch.stack([before[key] for before in befores]).mean(dim=0)
        if value.is_floating_point()
        else value
        for key, value in befores[0].items()
    }


def expected_of(runs: list[list[Looked]], case: Case) -> list[Snapshot]:
    """What a consensus shows at the start and after each step: the mean of what the replicas hold,
    unless the reference knows of another vector."""
    expected = [mean_of(runs, step) for step in range(LOOKS + 1)]
    simulated = replicas_of(inner_of(case), len(runs), total=LOOKS)
    rounds = reference_of(case, simulated)
    [shown] = replicas_of(inner_of(case), 1)
    known = {id(weight) for weight in shown.trainable()}
    parameters = [
        (key, weight)
        for key, weight in shown.model.named_parameters(remove_duplicate=False)
        if id(weight) in known
    ]
    while simulated[0].steps_done < LOOKS:
        found, step = next(rounds), simulated[0].steps_done
        if found is not None and step <= LOOKS:
            shown.set_weights(found)
            expected[step] |= {key: weight.detach().clone() for key, weight in parameters}
    return expected


CONSENSUS = [(case, 3) for case in [*CASES, *SHARDED, *WITH_MOMENTS]]
CONSENSUS += [(case, world) for case in RESTARTS for world in (1, 2)]


def is_telling_consensus(one: tuple[Case, int]) -> bool:
    case, _ = one
    return case in (*RESTARTS, *MOMENTS.items()) or (case in TELLING and case[0] in OF_A_KIND)


@pytest.mark.parametrize(("case", "world"), grid(CONSENSUS, is_telling_consensus), ids=str)
def test_consensus(workers: Pool, case: Case, world: int) -> None:
    """It shows the mean, and whoever looks changes no bit of the training."""
    runs = workers.run(looked_at, world, case)
    undisturbed = workers.run(trajectory, world, *case, inner_of(case), torch.float64, LOOKS)
    expected = expected_of(runs, case)
    for run, alone in zip(runs, undisturbed, strict=True):
        assert_same([before for before, _, _ in run], alone)
        assert_same([after for _, _, after in run], alone)
        for step, (before, inside, _) in enumerate(run):
            assert torch.equal(inside["seen"], before["seen"])
            floats = {key: one for key, one in inside.items() if one.is_floating_point()}
            torch.testing.assert_close(
                floats,
                {key: expected[step][key] for key in floats},
                rtol=1e-12,
                atol=1e-12,
                msg=lambda text, step=step: f"step {step}: {text}",
            )
    if case in RESTARTS and world > 1:  # else this problem could not tell one mean from the other
        for step in range(2 * TAU, LOOKS + 1, TAU):
            assert (expected[step]["scale"] - mean_of(runs, step)["scale"]).abs() > 1e-4
    before, inside, _ = runs[-1][LOOKS - 1]  # where the replicas differ, or nothing is shown
    exact = case[1].get("freeze_step", 0) >= LOOKS  # both kinds of Adam exchange whole vectors
    at_once = case[0] == "co2_keep" and case[1].get("delay") == 0  # a fragment has just come
    alike = exact or at_once or case[0] in ("allreduce", "acco", "demo", "onebit_adam")
    for key in ("norm.running_mean", "drift", *([] if alike else ["scale"])):
        assert world == 1 or not torch.equal(inside[key], before[key])


WAITS = ("co2", "co2_keep")
"""Methods whose consensus right after a round's end waits for what was started there."""


@replicas(2)
@pytest.mark.parametrize("name", OVERLAPPED)
def test_what_a_consensus_waits_for_stays_due(rank: int, name: str) -> None:
    """Amid a round it waits for nothing. Right after a round's end, and once more after training
    has ended, it waits where it has to."""
    session = Session(rank, name, SETTINGS[name])
    with SlowNetwork(lambda n: TAU) as network:
        session.train(TAU + 1)
        assert not network.works[-1].is_completed()
        session.shown()
        assert not network.works[-1].is_completed(), "the consensus waited for it"
        shown = session.train(TAU - 1).shown()
        launched = len(network.works)
        if SETTINGS[name].get("fragments", 1) == 1:
            assert network.works[-1].is_completed() == (name in WAITS), "it waits where it has to"
            assert session.method.state_dict()["means"][0]["in_flight"], "the result is still due"
        session.method.flush()
        assert all(work.is_completed() for work in network.works)
        assert_same(session.shown(), shown)
        assert len(network.works) == launched, "nothing was started for it"


# Stopping and going on.

RESUMED = [*CASES, *SHARDED, *WITH_MOMENTS]
RESUMED += [("diloco", {**SETTINGS["diloco"], "tau_power": 2.0})]
RESUMED_ON = [(case, 2) for case in RESUMED] + [(case, 1) for case in SETTINGS.items()]


FORMS: list[Case] = [
    ("diloco", {"tau_power": 2.0}),
    *((n, {"blocking_share": 0.4}) for n in ("overlap_local_sgd", "cocod_sgd", "eager_diloco")),
    ("streaming_diloco", {"tau": 5, "fragments": 3}),
    ("streaming_diloco", {"fragments": 1, "delay": None}),
    ("streaming_diloco", {"exchange": "int4"}),
    ("co2", {"gap_penalty": "gap_aware_elementwise", "clip_mode": "norm"}),
    ("co2", {"blocking_share": 0.4, "shard": True}),
    ("co2_keep", {"delay": 1}),
    ("co2_keep", {"delay": 3}),
    ("co2_keep", {"tau": 5}),
    ("co2_keep", {"fragments": 2, "blocking_share": 0.4}),
    ("mt_dao", {"late_momentum": True}),
    ("zero_one_adam", {"freeze_step": 9}),
]
"""Settings with which a method's state has another form, or is made on another way."""


def is_telling_resume(one: tuple[Case, int]) -> bool:
    case, world = one
    if world == 1 or case in (*TELLING, *MOMENTS.items()):
        return world == 2 or case[0] == "co2"
    return any(name == case[0] and own.items() <= case[1].items() for name, own in FORMS)


@replicas()
@pytest.mark.parametrize(("case", "world"), grid(RESUMED_ON, is_telling_resume), ids=str)
def test_resume_at_every_step(rank: int, world: int, case: Case) -> None:
    """Bit for bit as never having stopped, and so is what a consensus shows there; in a session of
    its own, and in one that goes back from elsewhere."""

    def new(seed: int = rank) -> Session:
        return Session(rank, *case, inner(case[0], "adamw"), seed=seed, total=STEPS)

    expected = new().train(4 * TAU).state()
    first = again = new()
    saves = []
    for _ in range(3 * TAU):
        first.step()
        saves.append((first.save(), copy.deepcopy(first.method.state_dict()), first.shown()))
    assert_same(first.train(TAU).state(), expected)  # neither saving nor looking is a disturbance
    for step, (saved, state, shown) in enumerate(saves, start=1):
        again = new(seed=rank + 50) if step % 2 else again.train(1)  # what is not loaded shows
        again.load(saved, step)
        assert_same(again.method.state_dict(), state)
        assert_same(again.shown(), shown)
        assert_same(again.train(4 * TAU - step).state(), expected)


IN_SEQUENCE = [
    (name, case)
    for name, case in (*CASES, CO2_IN_PARTS)
    if case.get("exchange", "full") != "full" or case.get("shard")
]
"""Cases whose exchange has arithmetic in the background, which writes more than a buffer."""


@replicas(2)
@pytest.mark.parametrize("case", nonempty(IN_SEQUENCE), ids=str)
def test_a_state_is_loaded_while_an_exchange_is_under_way(rank: int, case: Case) -> None:
    """What it still writes is of the training that is left."""
    original = HostRunner.run

    def run(runner: HostRunner, sequence: Callable[[], None]) -> None:
        original(runner, lambda: (time.sleep(0.2), sequence())[1])

    with patch.object(HostRunner, "run", run):
        session = Session(rank, *case, inner(case[0], "adamw"), total=STEPS).train(2 * TAU)
        saved, state = session.save(), copy.deepcopy(session.state()[2])
        for more in range(1, TAU + 1):  # it is under way after some of them
            session.train(more).load(saved, 2 * TAU)
            assert_same(session.state()[2], state)
        session.method.flush()


@pytest.mark.parametrize("name", METHODS)
def test_what_has_not_begun_has_cost_nothing(name: str) -> None:
    method = Session(0, name, SETTINGS[name]).method
    assert vars(method.totals()) == {"comm_s": 0, "exposed_s": 0, "bytes_sent": 0}


# A state that is loaded under another method or configuration than it was saved with either goes on
# as the new one says, or is refused in one line.

CHOICES = {
    "delay": 2,
    "fragments": 3,
    "exchange": "int8",
    "gap_penalty": 3.0,
    "clip_mode": "norm",
    "tau_power": 0.0,  # any other would need a schedule
}
"""Other values of keys that may be null or a word."""
KEYS = [
    (name, field.name)
    for name, method in METHODS.items()
    for field in dataclasses.fields(method.Config)
]
FIXED = {
    "diloco": "average_moments",
    "overlap_local_sgd": "pull",
    "streaming_diloco": "tau fragments delay exchange",
    "co2": "average_moments outer_lr gap_penalty shard",
    "co2_keep": "average_moments delay fragments momentum_weight",
    "sparta": "share",
    "mt_dao": "slow_beta late_momentum",
    "demo": "block",
    "onebit_adam": "freeze_step compress mask_below",
    "zero_one_adam": "freeze_step compress mask_below kappa double_every max_interval",
}
"""Settings by which a state was made: under another value, what was saved would mean something
else. They are typed here, because a method that frees one too many goes wrong in silence."""
REFUSED = nonempty(pair for pair in KEYS if pair[1] in FIXED.get(pair[0], "").split())
FREE = nonempty(pair for pair in KEYS if pair not in REFUSED)
ROUNDS_MAY_CHANGE = nonempty(case for case in TELLING if (case[0], "tau") in FREE)


def changed(name: str, key: str) -> Case:
    """A method's settings with another value of a key."""
    value = getattr(METHODS[name].Config(**SETTINGS[name]), key)
    if key in CHOICES:
        other: Any = CHOICES[key]
    elif isinstance(value, Enum):
        other = next(one for one in type(value) if one is not value)
    elif isinstance(value, bool):
        other = not value
    else:
        other = value - 1 if isinstance(value, int) else value / 2 or 1.0
    return name, {**SETTINGS[name], key: other}


def unscheduled(rank: int, name: str, settings: dict[str, Any]) -> Session:
    return Session(rank, name, settings, inner(name, "adamw"), scheduled=False)


def go_on(before: Session, name: str, settings: dict[str, Any]) -> Session:
    """What another session has trained so far, under other settings."""
    after = unscheduled(before.rank, name, settings)
    after.load(before.save(), before.steps_done)
    return after


@replicas(2)
@pytest.mark.parametrize("case", ROUNDS_MAY_CHANGE, ids=str)
def test_a_longer_round_ends_at_the_next_step(rank: int, case: Case) -> None:
    """8 of 12 steps, then τ = 4: as if the round had been one of 9."""
    name, settings = case
    ended = unscheduled(rank, name, {**settings, "tau": 9}).train(9)
    cut = unscheduled(rank, name, {**settings, "tau": 12}).train(8)
    expected = go_on(ended, name, {**settings, "tau": 4}).train(8)
    found = go_on(cut, name, {**settings, "tau": 4}).train(9)
    assert_same(found.snapshot(), expected.snapshot())


def test_what_is_not_fixed_may_change() -> None:
    assert [(name, key) for name, key in KEYS if key in METHODS[name].may_change] == FREE


@replicas(2)
@pytest.mark.parametrize(("name", "key"), grid(FREE, lambda pair: pair[0] in OF_A_KIND), ids=str)
def test_a_key_that_may_change(rank: int, name: str, key: str) -> None:
    """Wherever in a round the value changes, what was trained is shown as before, and what the
    replicas share stays equal on both."""
    before = unscheduled(rank, name, SETTINGS[name])
    for _ in range(2 * TAU):
        before.step()
        after = go_on(before, *changed(name, key))
        assert_same(after.shown(), before.shown())
        sent = after.method.stats().bytes_sent
        after.train(TAU + 1)
        assert after.method.stats().bytes_sent > sent
        tensors = after.method.saved_tensors()
        first, second = everybody({at: tensors.get(at) for at in ("anchor", "center")})
        assert_same(first, second)


@pytest.mark.parametrize(("name", "key"), REFUSED, ids=str)
def test_a_key_that_may_not(name: str, key: str) -> None:
    before = unscheduled(0, name, SETTINGS[name]).train(1)
    after = unscheduled(0, *changed(name, key))
    untouched = copy.deepcopy(after.method.saved_tensors())
    with pytest.raises(ConfigError, match=f"{name}.{key}=.* saved with"):
        after.method.load_state_dict(before.method.state_dict())
    assert_same(after.method.saved_tensors(), untouched)
    assert after.method.steps == 0


@pytest.mark.parametrize("name", METHODS)
def test_what_is_no_state_of_this_method(name: str) -> None:
    other = "slowmo" if name == "diloco" else "diloco"  # whose state has the same names
    saved = unscheduled(0, other, SETTINGS[other]).method.state_dict()
    says = {f"method={name}: the state was saved by {other}": [saved]}
    says[r"^state=.*: is no state that a method"] = [None, [], {}, {"steps": 3}]
    for text, states in says.items():
        for state in states:
            with pytest.raises(ConfigError, match=text):
                unscheduled(0, name, SETTINGS[name]).method.load_state_dict(state)


# What is equal on all replicas.

UNCHECKED = {"onebit_adam": {"m", "v"}, "zero_one_adam": {"m", "v", "u", "anchor"}}
"""Equal after two rounds and a step, and not always: what signs have brought."""


@replicas(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_equal_is_said_to_be(rank: int, name: str) -> None:
    """Of vectors, without what is only sent."""
    session = Session(rank, name, SETTINGS[name], dtype=torch.float32).train(2 * TAU + 1)
    said = session.method.replicated_tensors()
    named = session.method.saved_tensors() | said
    vectors = {key: tensor for key, tensor in named.items() if tensor.dim()}
    first, *others = everybody(vectors)
    equal = {key for key in first if all(torch.equal(first[key], one[key]) for one in others)}
    assert said.keys() <= equal and equal - said.keys() == UNCHECKED.get(name, set())


ALIKE = {
    *("allreduce", "local_sgd", "slowmo", "diloco", "sparseloco", "co2", "co2_released"),
    *("desloc", "mt_dao", "onebit_adam", "demo", "acco"),
}
"""Methods whose replicas start every round with equal weights. Those of no other do, but for 0/1
Adam's, which are alike after some rounds."""
WIRES = {"fp32": None, BF16: CommConfig(dtype=Precision.bf16)}


def refuses(case: Case, key: str) -> bool:
    name, settings = case
    return key in METHODS[name](METHODS[name].Config(**settings)).refusals()


@replicas(4)
@pytest.mark.parametrize(
    ("case", "wire"),
    grid(
        [
            (case, wire)
            for case in (*TELLING, FRAGMENTS)
            for wire in WIRES
            if not refuses(case, wire) and case[0] != "zero_one_adam"
        ],
        lambda one: one[0][0] in (*OF_A_KIND, "local_sgd", "slowmo", "sparseloco"),
    ),
    ids=str,
)
def test_replicas_start_rounds_bit_for_bit_alike(rank: int, case: Case, wire: str) -> None:
    """Rounding must not part them: nothing would ever bring them together again."""
    session = Session(rank, *case, dtype=torch.float32, comm=WIRES[wire], total=STEPS)
    trained = [weight for group in session.optimizer.param_groups for weight in group["params"]]
    equal = []
    for _ in range(3):
        session.train(TAU)
        first, *others = everybody([weight.detach().clone() for weight in trained])
        equal += [all(map(torch.equal, first, other)) for other in others]
    assert all(equal) == (case[0] in ALIKE)
