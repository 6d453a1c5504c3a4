"""Replicas that come and go, over gloo: a mean is one of those who took part, a newcomer gets its
state while the others train, and what is cut ends.

What they agree on is decided on a virtual clock, in test_agreement.py.
"""

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from co2.comm.background_mean import BackgroundMean, new_mean
from co2.comm.mesh import Mesh
from co2.comm.waiting import as_one, everyone
from co2.config import CommConfig
from co2.elastic.heartbeat import announce_gone, key
from co2.elastic.members import MemberLost, Members, ThreadFailed
from co2.elastic.quorum import Quorum
from co2.elastic.replicas import _TAG, Replicas, receive_state, send_state
from co2.methods import METHODS
from co2.methods.base import Method
from co2.train.state_file import HostCopy, rebuilt, split
from tests.workers import Pool, replicas

TAU, ROUNDS, RATE = 3, 5, 0.1
CONFIGS: dict[str, dict[str, Any]] = {
    "local_sgd": {},
    "co2": {"gap_penalty": "none", "outer_momentum": 0.3},
    "diloco": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "slowmo": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "cocod_sgd": {},
    "co2_keep": {"fragments": 1, "keep_local": 1.0, "momentum_weight": 0.0},
}
SIMULATED = {
    **{name: name for name in ("local_sgd", "co2", "cocod_sgd")},
    **{"diloco": "local_sgd", "slowmo": "local_sgd", "co2_keep": "cocod_sgd"},
}
"""What each is, as it is configured here."""
NOBODY = -1
MORE_ROUNDS = 6
JOINS = {"local_sgd": 1, "co2": 2}
"""By method: rounds that have ended when a newcomer who has always waited is let in. The first
decision is about the first mean, which an overlapped method obeys a round later."""


@pytest.fixture
def store() -> dist.TCPStore:
    """It outlives the members."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store: dist.TCPStore) -> int:
    return store.port


def member(rank: int, port: int, silent_s: float = 30.0, replica_size: int = 1) -> Members:
    dist.destroy_process_group()  # the pool's own
    return Members(("127.0.0.1", port), rank, silent_s, replica_size=replica_size)


def vanish(members: Members) -> None:
    """As if this process were killed; what started it says so."""
    members.close()
    members.sockets.cut()
    announce_gone(members.store, members.me)


def begun(rank: int, world: int, port: int, **settings: Any) -> Members:
    """A member of a run that all have begun together."""
    members = member(rank, port, **settings)
    members.first(range(world))
    members.formed()
    members.agree()
    return members


def goes_on(members: Members) -> tuple[int, ...]:
    """Those who are left form a generation, and leave in agreement. Returns them."""
    members.renew(admit=False)
    members.formed()
    return left(members)


def left(members: Members) -> tuple[int, ...]:
    """The members, who leave in agreement."""
    members.agree()
    ids = members.ids
    members.leave()
    return ids


@contextlib.contextmanager
def averaging(
    rank: int, world: int, port: int, **settings: Any
) -> Iterator[tuple[Members, BackgroundMean]]:
    """A member of a run, and a mean of two elements."""
    members = member(rank, port, **settings)
    members.first(range(world))
    mesh = Replicas(members, torch.device("cpu")).mesh
    mean = new_mean(2, mesh, CommConfig(), torch.float32, "cpu")
    members.formed()
    yield members, mean
    mean.close()
    left(members)


def tickets(members: Members) -> list[tuple[int, int]]:
    """The tickets of all collectives that these members begin from now on."""
    found: list[tuple[int, int]] = []
    original = members.open

    def opened() -> tuple[int, int]:
        found.append(original())
        return found[-1]

    members.open = opened
    return found


# A mean is that of those who took part.


def target(rank: int) -> Tensor:
    return torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * (rank + 1)


def steps_made(number: int, rank: int, unequal: bool) -> int:
    """Of a round: all, or others in each round and by each replica."""
    return 1 + (number + rank) % TAU if unequal else TAU


def train(
    members: Members, name: str, config: dict[str, Any], victim: int, at: int, unequal: bool
) -> list[Tensor] | None:
    """Replicas with a quadratic loss each. The victim vanishes before its step `at`, and has no
    result; that of the others are the weights and what the inner optimizer holds."""
    world, rank, opened = 3, members.me, tickets(members)
    members.first(range(world))
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    kind = torch.optim.AdamW if name == "desloc" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=RATE)
    method = METHODS[name](METHODS[name].Config(tau=TAU, **config))
    method.prepare(model, optimizer, Replicas(members, torch.device("cpu")).mesh)
    members.formed()
    for step in range(TAU * ROUNDS):
        if rank == victim and step == at:
            members.settle(opened[-1])  # the mean of the round before has arrived everywhere
            vanish(members)
            return None
        number, place = divmod(step, TAU)
        if place == 0 and unequal:
            shares = {one: steps_made(number, one, unequal) for one in members.ids}
            members.share_out(shares)
        if place < steps_made(number, rank, unequal):
            loss = 0.5 * (model.weight.flatten() - target(rank)).square().sum()
            loss.backward()
        method.step()
        optimizer.zero_grad()
    method.flush()
    assert left(members) == tuple(one for one in range(world) if one != victim)
    state = optimizer.state.get(model.weight, {})
    moments = [state[name] for name in ("exp_avg", "exp_avg_sq") if name in state]
    return [tensor.detach().flatten() for tensor in (model.weight, *moments)]


def simulated(name: str, rank: int, victim: int, at: int, unequal: bool) -> np.ndarray:
    """The same in one process: the mean of a round is that of those who have ended it, weighted by
    the steps that they have made."""
    momentum, late = np.zeros(3), np.zeros(3)
    starts, last = (dict.fromkeys(range(3), np.zeros(3)) for _ in range(2))
    for number in range(ROUNDS):
        there = [r for r in range(3) if r != victim or (number + 1) * TAU <= at]
        weights = [steps_made(number, one, unequal) for one in there]
        moved = {}
        for one, steps in zip(there, weights, strict=True):
            x = starts[one]
            for _ in range(steps):
                x = x - RATE * (x - target(one).numpy())
            moved[one] = x - starts[one]
        mean = np.average([*moved.values()], axis=0, weights=weights)
        momentum = CONFIGS["co2"]["outer_momentum"] * momentum + late
        for one in there:
            made = {
                "local_sgd": mean,
                "co2": momentum,
                "cocod_sgd": moved[one] + late - last[one],
            }
            starts[one] = starts[one] + made[name]
        last, late = moved, mean
    return starts[rank]


LOSSES = [(0, 7, False), (0, 7, True), (1, 6, True)]


@replicas(3)
@pytest.mark.parametrize(
    ("name", "victim", "at", "unequal"),
    [
        *((name, *loss) for name in ("local_sgd", "co2") for loss in LOSSES),
        *((name, NOBODY, 0, True) for name in SIMULATED if name not in ("local_sgd", "co2")),
    ],
)
def test_a_mean_is_that_of_those_who_are_left(
    rank: int, port: int, name: str, victim: int, at: int, unequal: bool
) -> None:
    """Equal to a simulation in one process, for a loss amid a round and one at its begin; also
    where replicas make unequal numbers of steps."""
    found = train(member(rank, port), name, CONFIGS[name], victim, at, unequal)
    if rank != victim:
        expected = simulated(SIMULATED[name], rank, victim, at, unequal)
        np.testing.assert_allclose(found[0], expected, rtol=1e-12)


def moments(rank: int, world: int, port: int) -> list[Tensor] | None:
    periods = {"first_moment_every": TAU, "second_moment_every": TAU}
    return train(member(rank, port), "desloc", periods, world - 1, 2 * TAU - 1, False)


def test_desloc_averages_its_moments_also_where_one_is_lost(workers: Pool, port: int) -> None:
    """The weights' mean is the first of three in that step, and meets the loss."""
    first, second, lost = workers.run(moments, 3, port)
    assert lost is None and len(first) == 3
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@replicas(4)
def test_means_of_replicas_are_weighted_by_steps(rank: int, world: int, port: int) -> None:
    """Two replicas of two workers make 1 and 3 steps; a mean is that of counterparts."""
    with averaging(rank, world, port, replica_size=2) as (members, mean):
        members.share_out({0: 1, 1: 1, 2: 3, 3: 3})
        mean.start(torch.full((2,), float(rank)))
        found = mean.wait()
        assert found is not None
        assert found.tolist() == [rank % 2 + (0 * 1 + 2 * 3) / 4] * 2


@replicas(2)
def test_the_agreement_about_a_mean_is_exposed(rank: int, world: int, port: int) -> None:
    """A mean is there at once and the members agree after a minute, on a clock that nothing else
    moves."""
    with averaging(rank, world, port) as (members, mean):
        now, settle = [0.0], members.settle

        def late(ticket: tuple[int, int]) -> None:
            settle(ticket)
            now[0] += 60.0

        with (
            patch.object(members, "settle", late),
            patch("co2.comm.clocks.time.perf_counter", lambda: now[0]),
        ):
            mean.mean_now()
            assert mean.totals().exposed_s == 60.0


@replicas(2)
def test_a_mean_that_was_joined_is_there(rank: int, world: int, port: int) -> None:
    """A consensus has joined it, and it is waited for when the store has long forgotten it."""
    with averaging(rank, world, port) as (members, mean):
        opened = tickets(members)
        mean.start(torch.full((2,), float(rank)))
        mean.peek()
        for _ in range(3):
            members.agree()
        while members.store.check([key("decided", *opened[0])]):
            time.sleep(0.01)
        found = mean.wait()
        assert found is not None and found.tolist() == [0.5, 0.5]


# What fails, on one member or one of its threads.


@replicas(2)
def test_what_fails_on_a_worker_fails_on_its_replica(rank: int, world: int, port: int) -> None:
    """The other one would wait for it in what they do next together."""
    members = begun(rank, world, port, replica_size=2)

    def act() -> None:
        if rank == 0:
            raise RuntimeError("cut")

    said = "cut" if rank == 0 else "a collective of another worker of the replica was cut"
    with pytest.raises(RuntimeError, match=f"^{said}$"):
        as_one(act)
    left(members)


@replicas(2)
def test_an_error_that_comes_back_is_not_taken_for_a_loss(rank: int, world: int, port: int) -> None:
    """What all do together has a bug, which is no loss of anybody."""
    members = member(rank, port)
    members.first(range(world))
    together = Replicas(members, torch.device("cpu"))
    members.formed()

    def act() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match=r"^a bug$"):
        together.together(act)
    vanish(members)


@replicas(2)
def test_a_thread_ends_its_member_in_one_line(rank: int, port: int) -> None:
    """An error that nobody expects ends the thread with which the first one gives a state."""
    members = member(rank, port)
    members.first(range(2))
    given = Replicas(members, torch.device("cpu"))
    members.formed()
    members.agree()

    def fail() -> float:
        raise KeyError("unexpected")

    def train_on() -> None:
        while len(members.ids) == 2:
            with contextlib.suppress(MemberLost):
                members.agree()
                continue
            members.renew(admit=False)
            members.formed()

    if rank == 0:
        given.give({}, fail, everyone())
        with pytest.raises(ThreadFailed, match="thread handover has failed: KeyError: 'unexpecte"):
            train_on()
        vanish(members)
        return
    train_on()
    assert members.lost == {0: "gone"} and left(members) == (1,)


@replicas(3)
def test_who_is_lost_amid_forming_is_not_waited_for(rank: int, world: int, port: int) -> None:
    """The others have counted it in, and wait for its address."""
    members = begun(rank, world, port)
    if rank == world - 1:
        with patch.object(members, "_enter", lambda _: vanish(members)):
            members.renew(admit=False)
        return
    # Longer than a case may take: who waits for as long as forming may take fails.
    with patch("co2.elastic.members.FORMING", timedelta(hours=1)):
        assert goes_on(members) == (0, 1)


@replicas(2)
def test_a_recovery_looks_at_no_object_from_before(rank: int, world: int, port: int) -> None:
    """To look at all that PyTorch and others have made takes seconds on a busy machine."""
    gc.unfreeze()  # what the pool's process has frozen itself
    members = begun(rank, world, port)  # else one cuts what the other still connects
    members.renew(admit=False)
    frozen, seen = gc.get_freeze_count(), len(gc.get_objects())
    assert seen < frozen / 20
    members.formed()
    left(members)


# A newcomer gets its state while the others train, and has a part from the round after the one in
# which it came.


class Replica:
    """A model with a quadratic loss, and what a session does with it."""

    def __init__(self, rank: int, name: str, members: Members) -> None:
        self.rank, self.members, self.step = rank, members, 0
        self.model = nn.Linear(3, 1, bias=False).double()
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.5)
        cls = METHODS[name]
        self.method: Method = cls(cls.Config(tau=TAU, **CONFIGS[name]))
        self.replicas = Replicas(members, torch.device("cpu"))
        mesh = self.replicas.mesh
        self._regroup(mesh)
        mesh.on_change(self._regroup)
        self.method.prepare(self.model, self.optimizer, mesh, fresh=not mesh.newcomer)
        self.quorum = Quorum(None, TAU, members, torch.device("cpu"), weighted=True)
        self.replicas.begin(self._changed)

    def _regroup(self, mesh: Mesh) -> None:
        self.control = mesh.new_group_of_workers()

    def _changed(self, lost: Mapping[int, str], before: int, began: float) -> None:
        self.quorum.regroup()
        if self.members.joined and self.rank == 0:
            assert self.control is not None
            copy = HostCopy()
            own = split(self.state(), 0)
            self.replicas.give((own.values, copy.take(own.tensors)), copy.wait, self.control)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "steps_in_round": self.quorum.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method.state_dict(),
        }

    def load(self, given: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
        state = rebuilt(given[0], given[1].__getitem__)
        self.step = state["step"]
        self.quorum.load_state_dict(state["steps_in_round"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.method.load_state_dict(state["method"])

    def train(self) -> bool:
        """One step. Returns whether it was made."""
        made = self.quorum.makes(self.step)
        if made:
            weight = self.model.weight.flatten()
            (0.5 * (weight - target(self.rank)).square().sum()).backward()
        self.method.step()
        self.quorum.share_out(self.step)
        self.optimizer.zero_grad()
        self.step += 1
        return made

    def end(self) -> list[float]:
        self.method.flush()
        self.members.agree()
        self.replicas.close()
        self.members.leave()
        return self.model.weight.flatten().tolist()


def simulated_with_a_newcomer(name: str) -> np.ndarray:
    """In one process: the newcomer is nowhere before the round after it came."""
    anchor, outer, late = np.zeros(3), np.zeros(3), None
    inner = [np.zeros(3) for _ in range(3)]
    for number in range(MORE_ROUNDS):
        if number == JOINS[name]:
            inner[-1] = inner[0].copy()
        ends = []
        for rank in range(3 if number > JOINS[name] else 2):
            x = anchor.copy()
            for _ in range(TAU):
                inner[rank] = 0.5 * inner[rank] + (x - target(rank).numpy())
                x -= RATE * inner[rank]
            ends.append(anchor - x)
        mean = np.mean(ends, axis=0)
        if name == "local_sgd":
            anchor = anchor - mean
        else:
            outer = CONFIGS["co2"]["outer_momentum"] * outer + (0 if late is None else late)
            anchor, late = anchor - outer, mean
    return anchor


@replicas(3)
@pytest.mark.parametrize("name", JOINS)
def test_a_newcomer_has_a_part_from_its_second_round_on(rank: int, port: int, name: str) -> None:
    """The last one comes to the others. It takes its state only when they have trained on."""
    members, comes = member(rank, port), rank == 2
    if comes:
        members.join()
        replica = Replica(rank, name, members)
        replica.replicas.receive_state(
            lambda: members.store.wait(["trained on"]), replica.load, replica.control
        )
    else:
        while not members.waiting():
            time.sleep(0.01)
        members.first(range(2))
        replica = Replica(rank, name, members)
    made = []
    while replica.step < TAU * MORE_ROUNDS:
        step = replica.step
        made += [step] if replica.train() else []
        if members.change_due:
            replica.replicas.renew(admit=True)
        elif len(members.ids) == 3 and step == JOINS[name] * TAU + TAU - 2:
            members.store.set("trained on", "1")
    weights = replica.end()
    np.testing.assert_allclose(weights, simulated_with_a_newcomer(name), rtol=1e-12)
    first = (JOINS[name] + 1) * TAU if comes else 0
    assert made == list(range(first, TAU * MORE_ROUNDS))


@replicas(3)
def test_one_that_is_lost_as_it_receives(rank: int, world: int, port: int) -> None:
    """It costs the others nothing but a change of members."""
    members = begun(rank, world, port)
    if rank == world - 1:
        vanish(members)
        return
    if rank == 0:
        state = {"weights": torch.zeros(4_000_000)}
        given = send_state(state, lambda: None, [world - 1], everyone(), members)
    members.renew(admit=False)
    members.formed()
    members.agree()
    if rank == 0:
        given()
    assert not [t for t in threading.enumerate() if t.name == "handover"]
    assert left(members) == (0, 1)


@replicas(3)
def test_one_whose_giver_is_lost_ends(rank: int, world: int, port: int) -> None:
    """The giver vanishes when it has told how much it will send, and nothing of that. Who gets it
    does not wait for the rest, and those who have a state go on."""
    members = begun(rank, world, port)
    if rank == 0:
        everyone().send([torch.tensor([1_000_000])], world - 1, _TAG).wait()
        vanish(members)
        return
    if rank == world - 1:
        with pytest.raises(RuntimeError):
            receive_state(everyone(), 0)
        vanish(members)  # it knows too little to train
        return
    with pytest.raises(MemberLost):
        members.agree()
    while members.ids != (rank,):
        members.renew(admit=False)
    members.formed()
    left(members)
