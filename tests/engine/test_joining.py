"""A replica that comes gets its state while the others train, and has a part from the round after
the one in which it came."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from co2.comm.mesh import Mesh
from co2.comm.waiting import everyone
from co2.elastic.members import MemberLost, Members
from co2.elastic.quorum import Quorum
from co2.elastic.replicas import _TAG, Replicas, receive_state, send_state
from co2.methods import METHODS
from co2.methods.base import Method
from co2.train.state_file import HostCopy, rebuilt, split
from tests.engine.test_members import CONFIGS, RATE, SIMULATED, TAU, member, store, target, vanish
from tests.workers import Pool

__all__ = ["store"]
ROUNDS = 6
JOINS = {"local_sgd": 1, "co2": 2}
"""By method: rounds that have ended when a newcomer who has always waited is let in. The first
decision is about the first mean, which an overlapped method obeys a round later."""


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


def train(rank: int, world: int, port: int, name: str) -> tuple[list[float], list[int]]:
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
    while replica.step < TAU * ROUNDS:
        step = replica.step
        made += [step] if replica.train() else []
        if members.change_due:
            replica.replicas.renew(admit=True)
        elif len(members.ids) == world and step == JOINS[name] * TAU + TAU - 2:
            members.store.set("trained on", "1")
    return replica.end(), made


def simulated(world: int, name: str) -> np.ndarray:
    """The same in one process: the newcomer is nowhere before the round after it came."""
    targets = [np.array([1.0, -2.0, 0.5]) * (rank + 1) for rank in range(world)]
    anchor, outer, late = np.zeros(3), np.zeros(3), None
    inner = [np.zeros(3) for _ in range(world)]
    for number in range(ROUNDS):
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
    workers: Pool, store: dist.TCPStore, name: str
) -> None:
    ended = workers.run(train, 3, store.port, name)
    expected = simulated(3, name)
    for weights, _ in ended:
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
    first = (JOINS[name] + 1) * TAU
    assert [made for _, made in ended] == [
        *[list(range(TAU * ROUNDS))] * 2,
        list(range(first, TAU * ROUNDS)),
    ]


@contextlib.contextmanager
def others(rank: int, world: int, port: int) -> Iterator[Members]:
    members = member(rank, port)
    members.first(range(world))
    members.formed()
    members.agree()
    yield members


def give_to_one_that_is_lost(rank: int, world: int, port: int) -> str:
    """The last one vanishes without having received anything."""
    with others(rank, world, port) as members:
        if rank == world - 1:
            vanish(members)
            return "vanished"
        if rank == 0:
            state = {"weights": torch.zeros(4_000_000)}
            given = send_state(state, lambda: None, [world - 1], everyone(), members)
        members.renew(admit=False)
        members.formed()
        members.agree()
        left = members.ids
        if rank == 0:
            given()
        assert not [t for t in threading.enumerate() if t.name == "handover"]
        members.agree()
        members.leave()
        return f"{left}"


def test_one_that_is_lost_as_it_receives(workers: Pool, store: dist.TCPStore) -> None:
    """It costs the others nothing but a change of members."""
    ended = workers.run(give_to_one_that_is_lost, 3, store.port)
    assert ended == ["(0, 1)", "(0, 1)", "vanished"]


def lose_the_giver(rank: int, world: int, port: int) -> str:
    """The first one vanishes when it has told how much it will send, and nothing of that."""
    with others(rank, world, port) as members:
        if rank == 0:
            everyone().send([torch.tensor([1_000_000])], world - 1, _TAG).wait()
            vanish(members)
            return "vanished"
        if rank == world - 1:
            with pytest.raises(RuntimeError):
                receive_state(everyone(), 0)
            vanish(members)  # it knows too little to train
            return "ended"
        with pytest.raises(MemberLost):
            members.agree()
        while members.ids != (rank,):
            members.renew(admit=False)
        members.formed()
        members.agree()
        members.leave()
        return "went on"


def test_one_whose_giver_is_lost_ends(workers: Pool, store: dist.TCPStore) -> None:
    """It does not wait for the rest, and those who have a state go on."""
    ended = workers.run(lose_the_giver, 3, store.port)
    assert ended == ["vanished", "went on", "ended"]
