"""Membership: how training goes on while replicas are lost and others come (launch.elastic).

co2/elastic/members.py agrees on who takes part; here is what that means for a run: with whom a
synchronization that has failed is made again, what a newcomer is given, and what is written down.
Where replicas do not come and go, nothing here waits for anybody or asks anything.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from co2.comm.mesh import Mesh
from co2.elastic.handover import Handover, receive
from co2.elastic.members import Expelled, MemberLost, Members
from co2.errors import PREEMPTED
from co2.record.metrics import Change

if TYPE_CHECKING:
    from co2.train.session import Session

T = TypeVar("T")
_WAIT_S = 1.0
"""Between two looks whether somebody has come."""
_FAILURES = 5


class Membership:
    """The replicas that train a session together."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.changes: list[Change] = []
        """How replicas came and went."""
        self._handover = Handover()
        self._failures = 0
        """Errors of what all do together, one after the other."""

    @property
    def _members(self) -> Members | None:
        return self._session.run.mesh.members

    def close(self) -> None:
        """End what gives newcomers their state."""
        self._handover.close()

    def synchronize(self) -> None:
        """The inner step, and the synchronization due now; with the replicas that are left, if some
        are lost in it."""
        session, run = self._session, self._session.run
        session.quorum.tell(session.step)
        try:
            run.method.step()
        except MemberLost:
            self._renew()
            self._again(run.method.go_on)
        shares = session.quorum.share_out(session.step)
        if shares is not None:
            run.record.log(shares)
            if text := shares.text():
                run.console.print_line(f"step {shares.step}: {text}")

    def together(self, act: Callable[[], T]) -> T:
        """Do what all workers do together and may do twice; where replicas may be lost, until all
        that are left have done it."""
        members = self._members
        if members is None:
            return act()
        return self._again(lambda: self._agreed(members, act))

    def change(self) -> None:
        """At the end of a step: let those in who wait. With too few replicas save, and wait.

        Raises:
            SystemExit: `PREEMPTED`, where nobody has come in time.
        """
        session, members = self._session, self._members
        if members is None:
            return
        launch = session.run.config.launch
        if members.change_due:
            self._renew(admit=True)
        if len(members.ids) >= launch.min_replicas:
            return
        session.save_now()
        text = f"fewer than launch.min_replicas={launch.min_replicas}; saved, and waiting"
        text = f"step {session.step}: {len(members.ids)} replicas, {text}"
        session.run.console.print_line(text)
        began = time.monotonic()
        while len(members.ids) < launch.min_replicas:
            if time.monotonic() - began > launch.wait_s:
                members.ask_to_stop()
            time.sleep(_WAIT_S)
            self.together(lambda: None)
            if members.stop_due:
                raise SystemExit(PREEMPTED)
            if members.change_due:
                self._renew(admit=True)

    def join(self) -> Any:
        """As a newcomer, go on from what the first of those who train already has. Returns that:
        what `Session.state` returned there. Raises `Expelled` where it is lost meanwhile."""
        session, members = self._session, self._members
        assert members is not None, "nobody comes to a run that is not elastic"
        try:
            members.agree()
            session.checkpoints.finish()  # the others wait for what they are saving
            state = receive(session.run.control)
            session.load(state)
            session.run.method.launch_again()
        except RuntimeError as error:
            # The others go on without this process, which knows too little.
            raise Expelled("one of the others was lost as it joined") from error
        return state

    def _agreed(self, members: Members, act: Callable[[], T]) -> T:
        """Do it, and wait until all have done it. Raises `MemberLost`."""
        try:
            done = act()
        except MemberLost:
            raise
        except RuntimeError as error:
            self._fruitless(error)
            members.failed(members.open(), error)
        members.agree()
        self._failures = 0
        return done

    def _again(self, act: Callable[[], T]) -> T:
        while True:
            try:
                return act()
            except MemberLost:
                self._renew()

    def _renew(self, admit: bool = False) -> None:
        """Go on with the members that are left, and with newcomers if `admit`."""
        session, run, members = self._session, self._session.run, self._members
        assert members is not None
        began, before = time.perf_counter(), run.mesh.num_workers
        if admit:
            self._handover.close()
        lost: dict[int, str] = {}
        while True:
            members.renew(admit)
            lost |= members.lost
            try:
                self._regroup(members)
                break
            except MemberLost:
                continue
            except RuntimeError as error:
                members.give_up(members.store, members.generation)
                self._fruitless(error)
        seconds = time.perf_counter() - began
        change = Change(
            session.step, members.generation, members.ids, lost, members.joined, seconds
        )
        self.changes.append(change)
        run.record.log(change)
        text = f"{change.text()}{session.samples.compared(before)}"
        run.console.print_line(f"step {session.step}: {text} ({seconds:.2f} s)")

    def _fruitless(self, error: RuntimeError) -> None:
        """Raise an error that comes back again and again: it is no loss of a connection."""
        self._failures += 1
        if self._failures >= _FAILURES:
            raise error

    def _regroup(self, members: Members) -> None:
        """Make all groups anew, begin to tell newcomers everything, and send again what was in
        flight."""
        session, run = self._session, self._session.run
        samples = session.samples
        mesh = Mesh.world(1, run.mesh.device)
        stretches = samples.stretches(run.mesh.num_workers, mesh.num_workers)
        run.regroup(replace(mesh, members=members, stretches=stretches), session.step)
        run.method.regroup(run.mesh)
        members.formed()
        members.agree()  # nobody leaves while another one still connects
        session.checkpoints.regroup(run.mesh, run.control)
        session.quorum.regroup()
        samples.behind = 0
        samples.begin()
        if members.joined and run.is_first:
            assert run.control is not None, "there are two at least"
            ranks = [members.ids.index(one) for one in members.joined]
            self._handover.give(session.state(), ranks, run.control)
        run.method.launch_again()
