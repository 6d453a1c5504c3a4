"""Replicas that come and go, over gloo: a mean is one of those who took part, a newcomer gets its
state while the others train, and what is cut ends.

What they agree on is decided on a virtual clock, in test_agreement.py.
"""

import contextlib
import gc
import random
import re
import socket
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
from co2.comm.waiting import as_one, everyone, finish, has_leaked, is_loss, until_cut, use
from co2.config import CommConfig
from co2.elastic.heartbeat import announce_gone, key
from co2.elastic.members import MemberLost, Members, ThreadFailed
from co2.elastic.quorum import Quorum
from co2.elastic.replicas import _TAG, Replicas, receive_state, send_state
from co2.elastic.sockets import Sockets, make_group
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
    "co2_keep": {"keep_local": 1.0, "outer_momentum": 0.0},
}
SIMULATED = ("local_sgd", "co2")
NOBODY = -1
MORE_ROUNDS = 6
JOINS = {"local_sgd": 1, "co2": 2}
"""By method: rounds that have ended when a newcomer who has always waited is let in. The first
decision is about the first mean, which an overlapped method obeys a round later."""
TRIALS = 40
"""Of a collective that is cut."""


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store: dist.TCPStore) -> int:
    """Of a store that outlives the members."""
    return store.port


@pytest.fixture
def fresh(workers: Pool) -> Iterator[Pool]:
    """Workers whose threads no other test meets: some wait until their time is out."""
    workers.close()
    yield workers
    workers.close()


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

    members.open = opened  # type: ignore[method-assign]
    return found


# A mean is that of those who took part.


def target(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * (rank + 1)


def steps_made(number: int, rank: int, unequal: bool) -> int:
    """Of a round: all, or others in each round and by each replica."""
    return 1 + (number + rank) % TAU if unequal else TAU


def train(
    rank: int, world: int, port: int, name: str, victim: int, at: int, unequal: bool
) -> list[float] | None:
    """Replicas with a quadratic loss each. The victim vanishes before its step `at`."""
    members = member(rank, port)
    opened = tickets(members)
    members.first(range(world))
    mesh = Replicas(members, torch.device("cpu")).mesh
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    cls = METHODS[name]
    method = cls(cls.Config(tau=TAU, **CONFIGS[name]))
    method.prepare(model, optimizer, mesh)
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
    assert members.ids == tuple(one for one in range(world) if one != victim)
    members.agree()
    members.leave()
    return model.weight.flatten().tolist()


def simulated(world: int, name: str, victim: int, at: int, unequal: bool) -> np.ndarray:
    """The same in one process: the mean of a round is that of those who have ended it, weighted by
    the steps that they have made."""
    targets = [np.array([1.0, -2.0, 0.5]) * (rank + 1) for rank in range(world)]
    anchor, momentum, late = np.zeros(3), np.zeros(3), None
    for number in range(ROUNDS):
        there = [r for r in range(world) if r != victim or (number + 1) * TAU <= at]
        ends = []
        for rank in there:
            x = anchor.copy()
            for _ in range(steps_made(number, rank, unequal)):
                x -= RATE * (x - targets[rank])
            ends.append(anchor - x)
        weights = [steps_made(number, rank, unequal) for rank in there]
        mean = np.average(ends, axis=0, weights=weights)
        if name == "local_sgd":
            anchor = anchor - mean
        else:
            momentum = CONFIGS["co2"]["outer_momentum"] * momentum + (0 if late is None else late)
            anchor, late = anchor - momentum, mean
    return anchor


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize(("world", "victim", "at"), [(2, 1, 4), (3, 0, 7), (3, 1, 6)])
def test_a_mean_is_that_of_those_who_are_left(
    workers: Pool,
    port: int,
    name: str,
    world: int,
    victim: int,
    at: int,
    unequal: bool,
) -> None:
    """Equal to a simulation in one process, for a loss amid a round and one at its begin; also
    where replicas make unequal numbers of steps."""
    ended = workers.run(train, world, port, name, victim, at, unequal)
    expected = simulated(world, name, victim, at, unequal)
    for rank, weights in enumerate(ended):
        if rank == victim:
            assert weights is None
        else:
            np.testing.assert_allclose(weights, expected, rtol=1e-12)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_mean_is_weighted_by_steps(workers: Pool, port: int, name: str) -> None:
    ended = workers.run(train, 3, port, name, NOBODY, 0, True)
    expected = simulated(3, name, NOBODY, 0, unequal=True)
    for weights in ended:
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
    assert not np.allclose(expected, simulated(3, name, NOBODY, 0, unequal=False), rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "like"),
    [("diloco", "local_sgd"), ("slowmo", "local_sgd"), ("cocod_sgd", "co2_keep")],
)
def test_methods_that_are_the_same_weigh_alike(workers: Pool, name: str, like: str) -> None:
    found = []
    for one in (name, like):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found.append(workers.run(train, 3, store.port, one, NOBODY, 0, True))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


def moments_after_a_loss(rank: int, world: int, port: int) -> list[list[float]] | None:
    """The last one is lost amid a round at whose end weights and both moments are averaged."""
    members = member(rank, port)
    opened = tickets(members)
    members.first(range(world))
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    cls = METHODS["desloc"]
    method = cls(cls.Config(tau=TAU, first_moment_every=TAU, second_moment_every=TAU))
    method.prepare(model, optimizer, Replicas(members, torch.device("cpu")).mesh)
    members.formed()
    for step in range(2 * TAU):
        if rank == world - 1 and step == 2 * TAU - 1:
            members.settle(opened[-1])
            vanish(members)
            return None
        (0.5 * (model.weight.flatten() - target(rank)).square().sum()).backward()
        method.step()
        optimizer.zero_grad()
    assert members.ids == tuple(range(world - 1))
    method.flush()
    members.agree()
    members.leave()
    state = optimizer.state[model.weight]
    vectors = model.weight, state["exp_avg"], state["exp_avg_sq"]
    return [vector.flatten().tolist() for vector in vectors]


def test_desloc_averages_its_moments_also_where_one_is_lost(workers: Pool, port: int) -> None:
    """The weights' mean is the first of three in that step, and meets the loss."""
    first, second, lost = workers.run(moments_after_a_loss, 3, port)
    assert lost is None and first == second


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
def test_a_thread_ends_its_member_in_one_line(rank: int, world: int, port: int) -> None:
    """An error that nobody expects ends the thread with which the first one gives a state."""
    members = member(rank, port)
    members.first(range(world))
    given = Replicas(members, torch.device("cpu"))
    members.formed()
    members.agree()

    def fail() -> float:
        raise KeyError("unexpected")

    if rank == 0:
        given.give({}, fail, everyone())
    if rank == 0:
        with pytest.raises(ThreadFailed) as ended:
            train_on(members, world)
        vanish(members)
        text = r"its thread handover has failed: KeyError: 'unexpected' \(.*test_members\.py:\d+\)"
        assert re.fullmatch(text, str(ended.value))
        return
    train_on(members, world)
    assert members.lost == {0: "gone"}
    assert left(members) == (1,)


def train_on(members: Members, world: int) -> None:
    """Until one of so many is lost."""
    while len(members.ids) == world:
        with contextlib.suppress(MemberLost):
            members.agree()
            continue
        members.renew(admit=False)
        members.formed()


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


def train_with_a_newcomer(
    rank: int, world: int, port: int, name: str
) -> tuple[list[float], list[int]]:
    """The last one comes to the others. It takes its state only when they have trained on. Returns
    the weights, and the steps that were made."""
    members = member(rank, port)
    if rank == world - 1:
        members.join()
        replica = Replica(rank, name, members)
        replica.replicas.receive_state(
            lambda: members.store.wait(["trained on"]), replica.load, replica.control
        )
    else:
        while not members.waiting():
            time.sleep(0.01)
        members.first(range(world - 1))
        replica = Replica(rank, name, members)
    made = []
    while replica.step < TAU * MORE_ROUNDS:
        step = replica.step
        made += [step] if replica.train() else []
        if members.change_due:
            replica.replicas.renew(admit=True)
        elif len(members.ids) == world and step == JOINS[name] * TAU + TAU - 2:
            members.store.set("trained on", "1")
    return replica.end(), made


def simulated_with_a_newcomer(world: int, name: str) -> np.ndarray:
    """The same in one process: the newcomer is nowhere before the round after it came."""
    targets = [np.array([1.0, -2.0, 0.5]) * (rank + 1) for rank in range(world)]
    anchor, outer, late = np.zeros(3), np.zeros(3), None
    inner = [np.zeros(3) for _ in range(world)]
    for number in range(MORE_ROUNDS):
        if number == JOINS[name]:
            inner[-1] = inner[0].copy()
        there = range(world if number > JOINS[name] else world - 1)
        ends = []
        for rank in there:
            x = anchor.copy()
            for _ in range(TAU):
                inner[rank] = 0.5 * inner[rank] + (x - targets[rank])
                x -= RATE * inner[rank]
            ends.append(anchor - x)
        mean = np.mean(ends, axis=0)
        if name == "local_sgd":
            anchor = anchor - mean
        else:
            outer = CONFIGS["co2"]["outer_momentum"] * outer + (0 if late is None else late)
            anchor, late = anchor - outer, mean
    return anchor


@pytest.mark.parametrize("name", SIMULATED)
def test_a_newcomer_has_a_part_from_its_second_round_on(
    workers: Pool, port: int, name: str
) -> None:
    ended = workers.run(train_with_a_newcomer, 3, port, name)
    expected = simulated_with_a_newcomer(3, name)
    for weights, _ in ended:
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
    first = (JOINS[name] + 1) * TAU
    assert [made for _, made in ended] == [
        *[list(range(TAU * MORE_ROUNDS))] * 2,
        list(range(first, TAU * MORE_ROUNDS)),
    ]


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


# A collective whose connections are cut ends, also where gloo forgets to tell it.


@replicas(2)
def test_only_the_connections_of_groups_are_cut(rank: int, world: int, port: int) -> None:
    """Others are nobody's business that were opened while the groups were: between two of them, and
    by another thread amid one."""
    members = member(rank, port)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connected() -> tuple[socket.socket, socket.socket]:
            return socket.create_connection(server.getsockname()), server.accept()[0]

        members.first(range(world))
        pairs = [connected()]

        def amid_others(*arguments: Any) -> dist.ProcessGroup:
            pairs.append(connected())
            return make_group(*arguments)

        with patch("co2.elastic.members.make_group", amid_others):
            group = members.new_group(range(world), None)
        members.formed()
        members.agree()
        members.cut(members.generation)
        assert len(pairs) == 2
        for one, other in pairs:
            one.sendall(b"on")
            assert other.recv(2) == b"on"
            one.close()
            other.close()
    with pytest.raises(RuntimeError):
        finish(dist.all_reduce(torch.ones(1), group=group, async_op=True), group, members.sockets)
    vanish(members)


def cut_again_and_again(rank: int, world: int, numel: int, longest_s: float) -> tuple[int, int]:
    """Collectives that are cut as they begin or amid. Returns how many have failed, and how many
    have ended well."""
    random.seed(rank)
    failed = 0
    for _ in range(TRIALS):
        sockets = Sockets()
        with sockets.opening():
            group = dist.new_group(list(range(world)))
        dist.barrier()
        work = dist.all_reduce(torch.ones(numel), group=group, async_op=True)
        time.sleep(longest_s * random.random())
        sockets.cut()
        try:
            finish(work, group, sockets)
        except RuntimeError:
            failed += 1
        del work, group  # takes the group down, unless it was leaked
    return failed, TRIALS - failed


def test_a_collective_that_is_cut_ends(fresh: Pool) -> None:
    ended = fresh.run(cut_again_and_again, 2, 3, 0.0005)
    assert all(failed > 0 for failed, _ in ended)


def act_and_cut(rank: int, world: int) -> list[str]:
    """Something that never ends by itself; something that fails; something that works."""
    found = []
    sockets = Sockets()
    use(sockets)
    try:
        until_cut(lambda: [][0])
    except IndexError as error:
        found.append(type(error).__name__)
    found.append(until_cut(lambda: "done"))
    sockets.cut()
    try:
        until_cut(lambda: time.sleep(60))
    except RuntimeError as error:
        found.append(str(error))
    found.append(f"leaked: {has_leaked()}")
    use(None)
    return found


def test_what_blocks_ends_with_the_connections(fresh: Pool) -> None:
    assert fresh.run(act_and_cut, 1) == [
        ["IndexError", "done", "what all do together was cut", "leaked: True"]
    ]


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]", True),
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:36869", True),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_an_error_of_a_lost_worker(text: str, loss: bool) -> None:
    assert is_loss(RuntimeError(text)) is loss
