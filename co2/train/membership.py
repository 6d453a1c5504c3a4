"""Membership: between two steps replicas come, and a run waits where too few are left."""

import time

from co2.errors import PREEMPTED
from co2.train.session import Session

_WAIT_S = 1.0
"""Between two looks whether somebody has come."""


def change(session: Session) -> None:
    """At the end of a step but the last: let those in who wait. With too few replicas save, and
    wait. Where replicas do not come and go, nothing happens.

    Raises:
        SystemExit: `PREEMPTED`, where nobody has come in time.
    """
    replicas, config = session.replicas, session.run.config
    if replicas is None or session.step == config.train.steps:
        return
    members = replicas.members
    if members.change_due:
        replicas.renew(admit=True)
    run, launch = session.run, config.launch
    if run.mesh.num_replicas >= launch.min_replicas:
        return
    session.save_now()
    text = f"fewer than launch.min_replicas={launch.min_replicas}; saved, and waiting"
    text = f"step {session.step}: {run.mesh.num_replicas} replicas, {text}"
    run.console.print_line(text)
    began = time.monotonic()
    while run.mesh.num_replicas < launch.min_replicas:
        if time.monotonic() - began > launch.wait_s:
            members.ask_to_stop()
        time.sleep(_WAIT_S)
        replicas.together(lambda: None)
        if members.stop_due:
            raise SystemExit(PREEMPTED)
        if members.change_due:
            replicas.renew(admit=True)
