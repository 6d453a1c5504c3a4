"""How members agree on what counts and who is left, on a virtual clock (tests/engine/virtual.py).

One test with real processes for each kind of fault is in tests/cli/test_elastic.py; that a mean is
one of those who took part, in test_members.py.
"""

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from co2.elastic.heartbeat import Heartbeat, Sign, add_to, announce_gone, key
from co2.elastic.members import Expelled, MemberLost, Members, StoreLost, ThreadFailed, Unreachable
from tests.engine.virtual import VirtualStore, World, virtual
from tests.grids import grid

SILENT_S = 10.0
WATCHERS = 8
"""Members that watch all others; the rest watch these, which takes as many calls."""


@pytest.fixture
def world() -> Iterator[World]:
    with virtual() as found:
        yield found


def begun(world: World, me: int, number: int, **settings: Any) -> Members:
    """A member of a run that so many have begun together."""
    members = world.member(me, **settings)
    members.first(range(number))
    if not settled(members):
        goes_on(members)
    return members


def settled(members: Members) -> bool:
    """Whether all members of this generation form it and agree in it."""
    try:
        members.formed()
        members.agree()
        return True
    except RuntimeError:
        members.give_up(members.store, members.generation)
        return False


def goes_on(members: Members, admit: bool = False) -> tuple[int, ...]:
    """Those who are left form a generation, as `Replicas.renew` does. Returns them."""
    members.renew(admit)
    while not settled(members):
        members.renew(admit)
    return members.ids


def agree_for_ever(members: Members) -> None:
    while True:
        members.agree()


def until_lost(members: Members) -> None:
    """Agree until somebody is lost."""
    with pytest.raises(MemberLost):
        agree_for_ever(members)


class TestDecisions:
    """A collective counts for all or for none."""

    @pytest.mark.parametrize("seed", range(20))
    def test_all_decide_alike(self, seed: int) -> None:
        """Members report at any time, and any of them may have failed."""
        drawn = random.Random(seed)
        number = drawn.choice((2, 3, 5, 9))
        failed = {me for me in range(number) if drawn.random() < 0.2}
        delays = [drawn.random() for _ in range(number)]

        def decide(me: int) -> tuple[bool, tuple[int, ...]]:
            members = begun(world, me, number)
            ticket = members.open()
            world.pause(delays[me])
            try:
                if me in failed:
                    members.failed(ticket, RuntimeError("connection closed"))
                members.ended(ticket, well=True)
                members.settle(ticket)
                counts = True
            except MemberLost:
                counts = False
            assert members.counts(ticket) == counts, "asked again it is the same"
            ids = goes_on(members)
            members.leave()
            return counts, ids

        with virtual(round_trip_s=0.05, seed=seed) as world:
            found = world.run(*[decide] * number)
        assert found == [(not failed, tuple(range(number)))] * number, "nobody is gone"

    def test_what_failed_after_all_others_reported_counts_for_none(self, world: World) -> None:
        def decide(me: int) -> bool:
            members = begun(world, me, 3)
            ticket = members.open()
            if me == 2:
                while members.store.add(key("done", *ticket), 0) < 2:
                    world.pause(0.01)
                members.ended(ticket, well=False)
            else:
                members.ended(ticket, well=True)
            with suppress(MemberLost):
                members.settle(ticket)
            return members.counts(ticket)

        assert world.run(*[decide] * 3) == [False] * 3

    @pytest.mark.parametrize(("who", "known"), [(3, (0.1, 0.2, 0.1 * 3)), (2, ()), (0, ())])
    def test_all_learn_the_same_paces(
        self, world: World, who: int, known: tuple[float, ...]
    ) -> None:
        """To the last bit, and none before all are known."""

        def pace(me: int) -> tuple[float, ...]:
            members = begun(world, me, 3)
            if me < who:
                members.measured(0.1 * (me + 1))
            world.pause(1.0 - 0.1 * me)  # one that has measured is the last to say so
            members.agree()
            return members.paces

        assert world.run(*[pace] * 3) == [known] * 3

    def test_all_are_asked_to_stop(self, world: World) -> None:
        def stop(me: int) -> int:
            members = begun(world, me, 3)
            if me == 1:
                members.ask_to_stop()
            made = 0
            while not members.stop_due:
                members.agree()
                made += 1
            return made

        assert len(set(world.run(*[stop] * 3))) == 1, "all in the same step"


class TestStore:
    def test_it_keeps_nothing_of_means_that_all_have(self, world: World) -> None:
        def many_means(me: int) -> list[int]:
            members = begun(world, me, 2)
            found = []
            for count in (20, 200):
                for _ in range(count):
                    tickets = members.open(), members.open()  # two are under way at a time
                    for ticket in tickets:
                        members.ended(ticket, well=True)
                    for ticket in tickets:
                        members.settle(ticket)
                members.agree()
                world.pause(10.0)
                members.agree()
                found.append(members.store.num_keys())
            members.agree()
            return found

        for some, many in world.run(*[many_means] * 2):
            assert abs(many - some) < 10, "a few are under way"

    def test_it_keeps_no_tickets_of_generations_before(self, world: World) -> None:
        def several_generations(me: int) -> None:
            members = begun(world, me, 2)
            for _ in range(3):
                for _ in range(5):
                    members.agree()
                goes_on(members)
            world.pause(10.0)
            members.agree()

        world.run(*[several_generations] * 2)
        of_tickets = [name for name in world.kept if re.match("(done|decided|here)/", name)]
        assert {name.split("/")[1] for name in of_tickets} == {"3"}

    @pytest.mark.parametrize("number", [1, 3])
    def test_it_is_lost(self, world: World, number: int) -> None:
        """All end, whether they ask it for something or wait."""

        def train(me: int) -> None:
            members = begun(world, me, number)
            if me == 0:
                world.pause(1.0)  # the others go on
                world.store_lost = True
            with pytest.raises((StoreLost, dist.DistNetworkError)):
                agree_for_ever(members)
            world.pause(1.0)  # the other threads find it, too
            with pytest.raises(StoreLost, match="the store of the run's members is gone"):
                members.renew(admit=False)

        world.run(*[train] * number)


class TestLosses:
    @pytest.mark.parametrize("told", [True, False])
    @pytest.mark.parametrize("round_trip_s", [0.001, 0.2])
    def test_the_others_go_on(self, round_trip_s: float, told: bool) -> None:
        """Also where nobody says that it is gone: once it has been silent for long enough."""

        def train(me: int) -> tuple[tuple[int, ...], str, float]:
            members = begun(world, me, 4, silent_s=SILENT_S)
            if me == 2:
                world.kill(me, told)
            began = world.now
            until_lost(members)
            took_s = world.now - began
            ids = goes_on(members)
            return ids, members.lost[2], took_s

        with virtual(round_trip_s) as world:
            found = world.run(*[train] * 4)
        for ids, why, took_s in (found[me] for me in (0, 1, 3)):
            assert ids == (0, 1, 3)
            assert why == "gone" if told else why.startswith("silent for 1")
            limit_s = 0.5 if told else 1.3 * SILENT_S
            assert took_s < limit_s + 8 * round_trip_s

    @pytest.mark.parametrize("number", grid([32, 128], (32).__eq__))
    def test_of_many_members_some_are_lost_in_each_round(self, number: int) -> None:
        victims = ((0, 17, number - 1), (1, number - 4))
        gone = {one for several in victims for one in several}

        def train(me: int) -> tuple[tuple[int, ...], list[float]]:
            members = begun(world, me, number)
            took = []
            for several in victims:
                if me in several:
                    world.kill(me)
                began = world.now
                until_lost(members)
                goes_on(members)
                took.append(world.now - began)
            return members.ids, took

        with virtual(0.01) as world:
            found = world.run(*[train] * number)
        left = tuple(one for one in range(number) if one not in gone)
        for one in left:
            ids, took = found[one]
            assert ids == left and max(took) < 20.0

    def test_who_was_silent_for_too_long_is_not_let_in_again(self, world: World) -> None:
        def train(me: int) -> str:
            members = begun(world, me, 3, silent_s=SILENT_S)
            if me == 2:
                world.hang(me, 3 * SILENT_S)
                with pytest.raises(Expelled) as ended:
                    members.renew(admit=False)
                return str(ended.value)
            until_lost(members)
            ids = goes_on(members)
            world.pause(3 * SILENT_S)
            return f"{ids} without {list(members.lost)}"

        *others, last = world.run(*[train] * 3)
        assert others == ["(0, 1) without [2]"] * 2
        assert re.fullmatch(r"silent for \d+ s; the others have gone on without it", last)

    def test_who_hangs_for_less_stays(self, world: World) -> None:
        def train(me: int) -> tuple[int, ...]:
            members = begun(world, me, 3, silent_s=SILENT_S)
            if me == 2:
                world.hang(me, 0.7 * SILENT_S)
            members.agree()
            return members.ids

        assert world.run(*[train] * 3) == [(0, 1, 2)] * 3

    def test_a_worker_takes_its_replica_with_it(self, world: World) -> None:
        def train(me: int) -> str:
            members = begun(world, me, 4, replica_size=2)
            if me == 3:
                world.kill(me)
            until_lost(members)
            try:
                ids = goes_on(members)
            except Expelled as ended:
                return str(ended)
            return f"{ids} without {members.lost}"

        why = "worker 3 of its replica is gone"
        left = f"(0, 1) without {{2: '{why}', 3: 'gone'}}"
        expelled = f"{why}; the others have gone on without it"
        assert world.run(*[train] * 4) == [left, left, expelled, None]

    def test_members_who_cannot_connect_with_each_other_say_so(self, world: World) -> None:
        """All give signs of life, so nobody is lost; to try again for ever would be silent."""
        world.refused[0] = 99
        with pytest.raises(Unreachable, match=r"members cannot connect with each other \(no conn"):
            world.run(partial(begun, world, number=1))

    def test_one_who_cannot_connect_at_once_does_later(self, world: World) -> None:
        world.refused[1] = 2
        found = world.run(*[lambda me: begun(world, me, 3).ids] * 3)
        assert found == [(0, 1, 2)] * 3

    @pytest.mark.parametrize("name", ["heartbeat", "reports"])
    def test_a_thread_ends_its_member_in_one_line(self, world: World, name: str) -> None:
        """After an error that nobody expects."""

        def train(me: int) -> str:
            members = begun(world, me, 2)
            if me == 0:
                world.broken_threads.add((me, name))
            try:
                while members.ids == (0, 1):
                    ticket = members.open()
                    members.ended(ticket, well=True)
                    with suppress(MemberLost):
                        members.settle(ticket)
                        continue
                    members.renew(admit=False)
                    members.formed()
            except ThreadFailed as ended:
                announce_gone(members.store, me)  # what started it would
                return str(ended)
            return f"{members.ids} without {members.lost}"

        first, second = world.run(*[train] * 2)
        text = rf"its thread {name} has failed: KeyError: 'unexpected' \(.*virtual\.py:\d+\)"
        assert re.fullmatch(text, first)
        assert second == "(1,) without {0: 'gone'}"


class TestNewcomers:
    @staticmethod
    def welcome(world: World, me: int, number: int, **settings: Any) -> Members:
        """Train until somebody waits, and let them in, as often as it takes."""
        members = begun(world, me, number, **settings)
        while not members.joined:
            members.agree()
            if members.change_due:
                goes_on(members, admit=True)
            world.pause(0.02)
        return members

    @staticmethod
    def come(world: World, me: int, **settings: Any) -> Members:
        world.pause(1.0)
        members = world.member(me, **settings)
        members.join()
        assert settled(members)
        return members

    @pytest.mark.parametrize("refused", [(), (0,), (3,), (1, 3)])
    @pytest.mark.parametrize("round_trip_s", [0.001, 0.2])
    def test_they_are_let_in_where_all_have_agreed(
        self, refused: tuple[int, ...], round_trip_s: float
    ) -> None:
        """Where members cannot connect just then, it has to ask again."""

        def train(me: int) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
            first = me < 3
            members = self.welcome(world, me, 3) if first else self.come(world, me)
            members.agree()
            assert not members.change_due
            return members.ids, members.joined, members.waiting()

        with virtual(round_trip_s) as world:
            for one in refused:
                world.start(one, partial(refuse_later, world, one), "refuses")
            found = world.run(*[train] * 4)
        assert found == [((0, 1, 2, 3), (3,), [])] * 4

    def test_one_that_is_killed_at_once_is_gone_at_once(self, world: World) -> None:
        """It has asked to join, and nobody has looked at it: the others would wait for as long as
        it may be silent."""

        def train(me: int) -> tuple[tuple[int, ...], float]:
            if me == 2:
                add_to(world.member(me, silent_s=3000.0).store, "asked", me)
                world.kill(me)
            members = begun(world, me, 2, silent_s=3000.0)
            while not members.change_due:
                members.agree()
            world.pause(1.0)
            began = world.now
            members.renew(admit=True)
            members.formed()
            members.agree()
            return members.ids, world.now - began

        found = world.run(*[train] * 3)
        assert [ids for ids, _ in found[:2]] == [(0, 1)] * 2
        assert max(took_s for _, took_s in found[:2]) < 2.0

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("refused", [(), (3,), (0,), (2, 3)])
    def test_a_replica_is_let_in_as_a_whole(self, refused: tuple[int, ...], seed: int) -> None:
        """Of two workers, of which one may not be able to connect, or sees another invitation."""

        def train(me: int) -> tuple[int, ...]:
            if me < 2:
                return self.welcome(world, me, 2, replica_size=2).ids
            return self.come(world, me, replica_size=2).ids

        with virtual(round_trip_s=0.2, seed=seed) as world:
            for one in refused:
                world.start(one, partial(refuse_later, world, one), "refuses")
            assert world.run(*[train] * 4) == [(0, 1, 2, 3)] * 4


def refuse_later(world: World, process: int) -> None:
    """The process's first attempt to connect with a newcomer fails."""
    world.pause(0.9)
    world.refused[process] = 1


class TestHeartbeat:
    """Signs of life: healthy members stay, and one that stands still is found."""

    @staticmethod
    def beating(world: World, number: int) -> tuple[list[Heartbeat], dict[int, float]]:
        """Members that watch all others, or the first ones; and when each found that the generation
        is over."""
        over: dict[int, float] = {}

        def live(me: int) -> Heartbeat:
            def ended(generation: int, told: bool) -> None:
                over[me] = world.now

            store: Any = VirtualStore(world)
            return Heartbeat(store, me, SILENT_S, ended, fail, clock=lambda: world.now)

        found = world.run(*[live] * number)
        watched = [
            range(number) if one < WATCHERS else {*range(WATCHERS), one} for one in range(number)
        ]
        world.run(*[lambda me: found[me].watch(watched[me], generation=0)] * number)
        world.run(*[lambda me: found[me].start()] * number)
        return found, over

    @pytest.mark.parametrize(
        ("number", "round_trip_s"),
        grid([(8, 0.005), (32, 0.2), (128, 0.2)], lambda case: case[0] < 128),
    )
    def test_one_that_hangs_is_found(self, number: int, round_trip_s: float) -> None:
        """By all that watch it, once it has been silent for `silent_s`, and not much later."""
        with virtual(round_trip_s) as world:
            _, over = self.beating(world, number)
            world.run(lambda _: world.pause(2.5 * SILENT_S), first=number)
            assert not over
            hung_at, victim = world.now, number - 1
            world.hang(victim, 99 * SILENT_S)
            world.run(lambda _: world.pause(2 * SILENT_S), first=number)
        found = [over[one] - hung_at for one in range(min(WATCHERS, number - 1))]
        # Since its last sign of life, which may be a tenth of it old. A look takes round trips.
        assert min(found) > 0.8 * SILENT_S and max(found) < 1.3 * SILENT_S + 5 * round_trip_s

    def test_after_all_were_suspended_nobody_is_lost(self, world: World) -> None:
        """As when a laptop's lid is closed, or a machine with all members is stopped."""
        _, over = self.beating(world, 8)
        for one in range(8):
            world.hang(one, 10 * SILENT_S)
        world.run(lambda _: world.pause(15 * SILENT_S), first=8)
        assert not over

    def test_a_look_takes_as_many_calls_for_one_as_for_many(self) -> None:
        calls = []
        for number in (2, 64):
            with virtual(0.005) as world:
                (first, *_), _ = self.beating(world, number)
                world.run(lambda _: world.pause(2.0), first=number)
                store: Any = first.store
                before = store.calls
                world.run(lambda _: world.pause(SILENT_S), first=number)
                calls.append(store.calls - before)
        assert calls[0] == pytest.approx(calls[1], rel=0.1) and calls[0] > 50

    def test_time_without_looks_is_no_silence(self) -> None:
        """Whoever was stopped itself, or looks rarely, needs several to call another silent."""
        sign = Sign(SILENT_S, 0.0)
        sign.seen(b"1", 1.0)
        for look in range(1, 6):
            sign.seen(b"1", 100.0 * look)
            assert sign.silence(100.0 * look) == SILENT_S / 5 * look
        assert sign.silence(501.0) > SILENT_S
        sign.seen(b"2", 502.0)
        assert sign.silence(503.0) == 1.0


def fail(error: Exception) -> None:
    raise error
