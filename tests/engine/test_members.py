"""Members agree on what counts and who is left, and a mean is then one of those who took part."""

import gc
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from co2.comm.background_mean import new_mean
from co2.comm.waiting import as_one, everyone, finish
from co2.config import CommConfig
from co2.elastic.heartbeat import add_to, announce_gone, key
from co2.elastic.members import Expelled, MemberLost, Members, Roster, ThreadFailed
from co2.elastic.replicas import Replicas
from co2.elastic.sockets import make_group
from co2.methods import METHODS
from tests.workers import Pool

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


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def member(rank: int, port: int, silent_s: float = 30.0, replica_size: int = 1) -> Members:
    dist.destroy_process_group()  # the pool's own
    return Members(("127.0.0.1", port), rank, silent_s, replica_size=replica_size)


def vanish(members: Members) -> None:
    """As if this process were killed; what started it says so."""
    members.close()
    members.sockets.cut()
    announce_gone(members.store, members.me)


def tickets(members: Members) -> list[tuple[int, int]]:
    """The tickets of all collectives that these members begin from now on."""
    found: list[tuple[int, int]] = []
    original = members.open

    def opened() -> tuple[int, int]:
        found.append(original())
        return found[-1]

    members.open = opened  # type: ignore[method-assign]
    return found


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


def test_desloc_averages_its_moments_also_where_one_is_lost(
    workers: Pool, store: dist.TCPStore
) -> None:
    """The weights' mean is the first of three in that step, and meets the loss."""
    first, second, lost = workers.run(moments_after_a_loss, 3, store.port)
    assert lost is None and first == second


def bystanders(rank: int, world: int, port: int) -> list[str]:
    """Connections that are nobody's business, opened while the groups are: between two of them,
    and by another thread amid one."""
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
        found = []
        for one, other in pairs:
            one.sendall(b"on")
            found.append(other.recv(2).decode())
            one.close()
            other.close()
    try:
        finish(dist.all_reduce(torch.ones(1), group=group, async_op=True), group, members.sockets)
    except RuntimeError:
        found.append("cut")
    vanish(members)
    return found


def test_only_the_connections_of_groups_are_cut(workers: Pool, store: dist.TCPStore) -> None:
    assert workers.run(bystanders, 2, store.port) == [["on", "on", "cut"]] * 2


NOBODY = -1


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize(("world", "victim", "at"), [(2, 1, 4), (3, 0, 7), (3, 1, 6)])
def test_a_mean_is_that_of_those_who_are_left(
    workers: Pool,
    store: dist.TCPStore,
    name: str,
    world: int,
    victim: int,
    at: int,
    unequal: bool,
) -> None:
    """Equal to a simulation in one process, for a loss amid a round and one at its begin; also
    where replicas make unequal numbers of steps."""
    ended = workers.run(train, world, store.port, name, victim, at, unequal)
    expected = simulated(world, name, victim, at, unequal)
    for rank, weights in enumerate(ended):
        if rank == victim:
            assert weights is None
        else:
            np.testing.assert_allclose(weights, expected, rtol=1e-12)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_mean_is_weighted_by_steps(workers: Pool, store: dist.TCPStore, name: str) -> None:
    ended = workers.run(train, 3, store.port, name, NOBODY, 0, True)
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


def pace(rank: int, world: int, port: int, who: int) -> tuple[float, ...]:
    """So many of the members tell how long they need for a step."""
    members = member(rank, port)
    members.first(range(world))
    members.formed()
    if rank < who:
        members.measured(0.1 * (rank + 1))
    members.agree()
    found = members.paces
    members.agree()
    members.leave()
    return found


@pytest.mark.parametrize(("who", "known"), [(3, (0.1, 0.2, 0.1 * 3)), (2, ()), (0, ())])
def test_all_learn_the_same_paces(
    workers: Pool, store: dist.TCPStore, who: int, known: tuple[float, ...]
) -> None:
    """To the last bit, and none before all are known."""
    assert set(workers.run(pace, 3, store.port, who)) == {known}


def collected(rank: int, world: int, port: int) -> tuple[int, int]:
    """How many objects a collection amid a recovery leaves alone, and how many it looks at."""
    gc.unfreeze()  # what the pool's process has frozen itself
    members = member(rank, port)
    members.first(range(world))
    members.formed()
    members.agree()  # else one cuts what the other still connects, and no generation has both
    members.renew(admit=False)
    found = gc.get_freeze_count(), len(gc.get_objects())
    members.formed()
    members.agree()
    members.leave()
    return found


def test_a_recovery_looks_at_no_object_from_before(workers: Pool, store: dist.TCPStore) -> None:
    """To look at all that PyTorch and others have made takes seconds on a busy machine."""
    for frozen, seen in workers.run(collected, 2, store.port):
        assert seen < frozen / 20


def decide(rank: int, world: int, port: int) -> str:
    """A collective ends well on every member but the last, which finds it failed."""
    members = member(rank, port)
    members.first(range(world))
    members.formed()
    members.agree()
    ticket = members.open()
    try:
        if rank == world - 1:
            while members.store.add(key("done", *ticket), 0) < world - 1:
                time.sleep(0.01)
            members.failed(ticket, RuntimeError("connection closed"))
        members.ended(ticket, well=True)
        members.settle(ticket)
        found = "counts"
    except MemberLost:
        found = "lost"
    assert members.counts(ticket) == (found == "counts"), "asked again it is the same"
    members.renew(admit=False)
    assert members.ids == tuple(range(world)), "nobody is gone"
    members.formed()
    members.agree()
    members.leave()
    return found


def test_what_failed_on_one_member_counts_for_none(workers: Pool, store: dist.TCPStore) -> None:
    assert set(workers.run(decide, 3, store.port)) == {"lost"}


def stand_still(rank: int, world: int, port: int) -> str:
    """The last one gives no sign of life until the others have gone on, and wants to go on then."""
    members = member(rank, port, silent_s=10.0)
    members.first(range(world))
    members.formed()
    members.agree()
    if rank == world - 1:
        members._heart.close()
        members.store.wait(["went on"])
        try:
            members.renew(admit=False)
        except Expelled as ended:
            members.store.set("tried", "1")
            return str(ended)
        return "let in again"
    try:
        members.agree()
    except MemberLost:
        members.renew(admit=False)
        members.formed()
        members.agree()
    found = f"{members.ids} without {list(members.lost)}"
    members.store.set("went on", "1")
    members.store.wait(["tried"])
    members.leave()
    return found


def test_who_was_silent_for_too_long_is_not_let_in_again(
    workers: Pool, store: dist.TCPStore
) -> None:
    *others, last = workers.run(stand_still, 3, store.port)
    assert set(others) == {"(0, 1) without [2]"}
    assert re.fullmatch(r"silent for \d+ s; the others have gone on without it", last)


def come(rank: int, world: int, port: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last one comes to the others, who find in a decision that somebody waits."""
    members = member(rank, port)
    if rank == world - 1:
        members.join()
        members.formed()
        members.agree()
        members.leave()
        return members.joined, ()
    members.first(range(world - 1))
    members.formed()
    while not members.change_due:
        members.agree()
        time.sleep(0.02)
    members.renew(admit=True)
    ids = members.ids
    members.formed()
    members.agree()
    members.leave()
    return members.joined, ids


def test_newcomers_are_let_in_where_all_have_agreed(workers: Pool, store: dist.TCPStore) -> None:
    *others, (own, _) = workers.run(come, 4, store.port)
    assert others == [((3,), (0, 1, 2, 3))] * 3 and own == (3,)


def come_in_vain(rank: int, world: int, port: int) -> tuple[int, ...]:
    """The members cannot connect when the last one comes, so that it has to ask again."""
    members = member(rank, port)
    if rank == world - 1:
        members.join()
        members.formed()
    else:
        members.first(range(world - 1))
        members.formed()
        enter, errors = members._enter, [RuntimeError("no connection")] * (rank == 0)

        def fail_once(roster: Roster) -> None:
            if errors:
                raise errors.pop()
            enter(roster)

        with patch.object(members, "_enter", fail_once):
            while len(members.ids) < world:
                members.agree()
                if members.change_due:
                    members.renew(admit=True)
                    members.formed()
                time.sleep(0.02)
    members.agree()
    ids = members.ids
    members.leave()
    return ids


def test_one_that_was_let_in_in_vain_comes_later(workers: Pool, store: dist.TCPStore) -> None:
    assert workers.run(come_in_vain, 3, store.port) == [(0, 1, 2)] * 3


def come_and_die(rank: int, world: int, port: int) -> tuple[int, ...]:
    """The last one asks to join and is killed before anybody has looked at it. The others would
    wait for as long as it may be silent."""
    members = member(rank, port, silent_s=3600.0)
    if rank == world - 1:
        add_to(members.store, "asked", rank)
        vanish(members)
        members.store.set("dead", "1")
        return ()
    members.first(range(world - 1))
    members.formed()
    members.store.wait(["dead"])
    until_noticed(members)
    while not members.change_due:
        members.agree()
    members.renew(admit=True)
    members.formed()
    members.agree()
    found = members.ids
    members.leave()
    return found


def until_noticed(members: Members) -> None:
    """Until the heartbeat knows of all departures there are."""
    while members._heart._departures < members.store.add("departures", 0):
        time.sleep(0.01)


def test_a_newcomer_that_is_killed_at_once_is_gone_at_once(
    workers: Pool, store: dist.TCPStore
) -> None:
    assert workers.run(come_and_die, 3, store.port) == [(0, 1), (0, 1), ()]


def many_means(rank: int, world: int, port: int) -> list[int]:
    """How many keys the store has after some means, and after many more."""
    members = member(rank, port)
    members.first(range(world))
    members.formed()
    found = []
    for count in (20, 200):
        for _ in range(count):
            tickets = members.open(), members.open()  # two are under way at a time
            for ticket in tickets:
                members.ended(ticket, well=True)
            for ticket in tickets:
                members.settle(ticket)
        members.agree()
        while not members._reports.waiting.empty():
            time.sleep(0.01)
        members.agree()
        found.append(members.store.num_keys())
    members.agree()
    members.leave()
    return found


def test_the_store_keeps_nothing_of_means_that_all_have(
    workers: Pool, store: dist.TCPStore
) -> None:
    for some, many in workers.run(many_means, 2, store.port):
        assert abs(many - some) < 10, "a few are under way"


def agreement(rank: int, world: int, port: int) -> float:
    """Seconds that are exposed where a mean is there at once and the members agree after a minute,
    on a clock that nothing else moves."""
    members = member(rank, port)
    members.first(range(world))
    mesh = Replicas(members, torch.device("cpu")).mesh
    mean = new_mean(2, mesh, CommConfig(), torch.float32, "cpu")
    members.formed()
    now, settle = [0.0], members.settle

    def late(ticket: tuple[int, int]) -> None:
        settle(ticket)
        now[0] += 60.0

    with (
        patch.object(members, "settle", late),
        patch("co2.comm.clocks.time.perf_counter", lambda: now[0]),
    ):
        mean.mean_now()
        exposed_s = mean.totals().exposed_s
    mean.close()
    members.agree()
    members.leave()
    return exposed_s


def test_the_agreement_about_a_mean_is_exposed(workers: Pool, store: dist.TCPStore) -> None:
    assert workers.run(agreement, 2, store.port) == [60.0, 60.0]


def joined_and_waited(rank: int, world: int, port: int) -> list[float]:
    """A mean that a consensus has joined is waited for when the store has long forgotten it."""
    members = member(rank, port)
    members.first(range(world))
    mesh = Replicas(members, torch.device("cpu")).mesh
    mean = new_mean(2, mesh, CommConfig(), torch.float32, "cpu")
    members.formed()
    mean.start(torch.full((2,), float(rank)))
    mean.peek()
    for _ in range(3):
        members.agree()
    while not members._reports.waiting.empty():
        time.sleep(0.01)
    members.agree()
    found = mean.wait()
    assert found is not None
    mean.close()
    members.agree()
    members.leave()
    return found.tolist()


def test_a_mean_that_was_joined_is_there(workers: Pool, store: dist.TCPStore) -> None:
    assert workers.run(joined_and_waited, 2, store.port) == [[0.5, 0.5]] * 2


def several_generations(rank: int, world: int, port: int) -> list[str]:
    """What the store holds of tickets when a generation has followed another."""
    members = member(rank, port)
    members.first(range(world))
    for _ in range(3):
        members.formed()
        for _ in range(5):
            members.agree()
        members.renew(admit=False)
    members.formed()
    members.agree()
    while not members._reports.waiting.empty():
        time.sleep(0.01)
    members.agree()
    old = [key(name, 0, number) for name in ("done", "decided") for number in range(1, 6)]
    found = [name for name in old if members.store.check([name])]
    members.agree()
    members.leave()
    return found


def test_the_store_keeps_no_tickets_of_generations_before(
    workers: Pool, store: dist.TCPStore
) -> None:
    assert workers.run(several_generations, 2, store.port) == [[], []]


def lost_amid_forming(rank: int, world: int, port: int) -> tuple[int, ...]:
    """The last one is lost when the others have counted it in, and wait for its address."""
    members = member(rank, port)
    members.first(range(world))
    members.formed()
    members.agree()
    if rank == world - 1:
        with patch.object(members, "_enter", lambda _: vanish(members)):
            members.renew(admit=False)
        return ()
    # Longer than a case may take: who waits for as long as forming may take fails.
    with patch("co2.elastic.members.FORMING", timedelta(hours=1)):
        members.renew(admit=False)
    members.formed()
    members.agree()
    ids = members.ids
    members.leave()
    return ids


def test_who_is_lost_amid_forming_is_not_waited_for(workers: Pool, store: dist.TCPStore) -> None:
    assert workers.run(lost_amid_forming, 3, store.port) == [(0, 1), (0, 1), ()]


def hopeless(rank: int, world: int, port: int) -> str:
    """What all do together has a bug, which is no loss of anybody."""

    def act() -> None:
        raise RuntimeError("a bug")

    members = member(rank, port)
    members.first(range(world))
    replicas = Replicas(members, torch.device("cpu"))
    members.formed()
    try:
        replicas.together(act)
    except RuntimeError as error:
        return str(error)
    finally:
        vanish(members)
    return "went on"


def test_an_error_that_comes_back_is_not_taken_for_a_loss(
    workers: Pool, store: dist.TCPStore
) -> None:
    assert workers.run(hopeless, 2, store.port) == ["a bug"] * 2


def lose_a_thread(rank: int, world: int, port: int, name: str) -> str:
    """An error that nobody expects ends another thread of the first one."""
    members = member(rank, port)
    members.first(range(world))
    replicas = Replicas(members, torch.device("cpu"))
    members.formed()
    members.agree()

    def fail() -> float:
        raise KeyError("unexpected")

    if rank == 0 and name == "heartbeat":
        members._heart.turn = fail  # type: ignore[method-assign]
    elif rank == 0 and name == "reports":
        members._reports.add(fail)
    elif rank == 0:
        replicas.give({}, fail, everyone())
    try:
        while len(members.ids) == world:
            ticket = members.open()
            members.ended(ticket, well=True)
            with suppress(MemberLost):
                members.settle(ticket)
                continue
            members.renew(admit=False)
            members.formed()
    except ThreadFailed as ended:
        vanish(members)
        return str(ended)
    members.agree()
    found = f"{members.ids} without {members.lost}"
    members.leave()
    return found


@pytest.mark.parametrize("name", ["heartbeat", "reports", "handover"])
def test_a_thread_ends_its_member_in_one_line(
    workers: Pool, store: dist.TCPStore, name: str
) -> None:
    first, second = workers.run(lose_a_thread, 2, store.port, name)
    text = rf"its thread {name} has failed: KeyError: 'unexpected' \(.*test_members\.py:\d+\)"
    assert re.fullmatch(text, first)
    assert second == "(1,) without {0: 'gone'}"


def lose_a_sibling(rank: int, world: int, port: int) -> str:
    """Of two replicas of two workers the last one vanishes."""
    members = member(rank, port, replica_size=2)
    members.first(range(world))
    members.formed()
    members.agree()
    if rank == world - 1:
        vanish(members)
        return "vanished"
    try:
        with suppress(MemberLost):
            members.agree()
        members.renew(admit=False)
    except Expelled as ended:
        members.close()
        return str(ended)
    members.formed()
    members.agree()
    found = f"{members.ids} without {members.lost}"
    members.leave()
    return found


def test_a_worker_takes_its_replica_with_it(workers: Pool, store: dist.TCPStore) -> None:
    why = "worker 3 of its replica is gone"
    left = f"(0, 1) without {{2: '{why}', 3: 'gone'}}"
    expelled = f"{why}; the others have gone on without it"
    assert workers.run(lose_a_sibling, 4, store.port) == [left, left, expelled, "vanished"]


def come_as_a_whole(rank: int, world: int, port: int) -> tuple[tuple[int, ...], list[int]]:
    """A replica of two workers comes to another one. Its first attempt fails on one of them, and
    the other one first sees an invitation that has been renewed since."""
    members = member(rank, port, replica_size=2)
    asked = []
    if rank < 2:
        members.first((0, 1))
        members.formed()
        while members.joined != (2, 3):
            members.agree()
            if members.change_due:
                asked.append(len(members.waiting()))
                with suppress(RuntimeError):
                    members.renew(admit=True)
                    members.formed()
            time.sleep(0.02)
    else:
        enter, errors = members._enter, [RuntimeError("no connection")] * (rank == 3)

        def fail_once(roster: Roster) -> None:
            if errors:
                raise errors.pop()
            enter(roster)

        invitation, late = members._invitation, [1] * (rank == 2)

        def seen() -> int:
            found = invitation()
            return found - late.pop() if late and found >= 0 else found

        with (
            patch.object(members, "_enter", fail_once),
            patch.object(members, "_invitation", seen),
        ):
            members.join()
        members.formed()
    members.agree()
    ids = members.ids
    members.leave()
    return ids, asked


def test_a_replica_is_let_in_as_a_whole(workers: Pool, store: dist.TCPStore) -> None:
    for ids, asked in workers.run(come_as_a_whole, 4, store.port):
        assert ids == (0, 1, 2, 3) and set(asked) <= {2, 4}


def siblings_weigh_alike(rank: int, world: int, port: int) -> list[float]:
    """Two replicas of two workers make 1 and 3 steps; a mean is that of counterparts."""
    members = member(rank, port, replica_size=2)
    members.first(range(world))
    mesh = Replicas(members, torch.device("cpu")).mesh
    mean = new_mean(2, mesh, CommConfig(), torch.float32, "cpu")
    members.formed()
    members.share_out({0: 1, 1: 1, 2: 3, 3: 3})
    mean.start(torch.full((2,), float(rank)))
    found = mean.wait()
    assert found is not None
    mean.close()
    members.agree()
    members.leave()
    return found.tolist()


def test_means_of_replicas_are_weighted_by_steps(workers: Pool, store: dist.TCPStore) -> None:
    found = workers.run(siblings_weigh_alike, 4, store.port)
    assert found == [[k + (0 * 1 + 2 * 3) / 4] * 2 for k in (0, 1, 0, 1)]


def one_fails(rank: int, world: int, port: int) -> str:
    """What goes well on one worker of a replica, and not on the other."""
    members = member(rank, port, replica_size=2)
    members.first(range(world))
    members.formed()

    def act() -> str:
        if rank == 0:
            raise RuntimeError("cut")
        return "went on"

    try:
        found = as_one(act)
    except RuntimeError as error:
        found = str(error)
    members.agree()
    members.leave()
    return found


def test_what_fails_on_a_worker_fails_on_its_replica(workers: Pool, store: dist.TCPStore) -> None:
    """The other one would wait for it in what they do next together."""
    other = "a collective of another worker of the replica was cut"
    assert workers.run(one_fails, 2, store.port) == ["cut", other]
