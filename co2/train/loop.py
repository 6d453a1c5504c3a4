"""The training loop, from top to bottom."""

import time
from contextlib import closing
from typing import NoReturn

import torch
from torch import Tensor

from co2.errors import PREEMPTED
from co2.randomness import deterministic, seed_everything
from co2.record.fingerprint import FIRST
from co2.record.metrics import Notice
from co2.start.processes import stop_signals
from co2.train.build import build
from co2.train.expert_parallel import clip
from co2.train.run import Run
from co2.train.schedule import set_lr
from co2.train.session import Session
from co2.train.stop import voted
from co2.train.summary import sum_up
from co2.train.within_replica import accumulating

_WAIT_S = 1.0
"""Between two looks whether a replica has come."""


def train(run: Run) -> None:
    """Train a run to its end, or to where it is told to stop. Every worker calls this.

    Raises:
        SystemExit: `PREEMPTED` when the run was told to stop and has saved, 1 when it could not
            save; `DIVERGED` when a loss, a validation loss or what is to be saved is not finite.
    """
    config, method = run.config, run.method
    steps = config.train.steps
    pauses = (config.log.every, config.train.eval_every, config.checkpoint.every)
    seed_everything(config.train.seed, run.mesh.worker)
    with deterministic(config.train.deterministic), run, closing(build(run)) as session:
        losses = session.losses
        run.record.begin(session.step)
        run.trace.begin(method.round_steps)
        _warn_of_late_means(run)
        grace_s = config.checkpoint.grace_s
        with voted(session.replicas, run.mesh, stop_signals(), session.step, grace_s) as stop:
            while session.step < steps:
                set_lr(session.optimizer, config.optim, session.step, steps)
                makers = session.quorum.making(session.step, run.mesh.num_workers)
                units = session.samples.units(makers)
                if session.quorum.makes(session.step):
                    # On a CPU a bad loss ends the run before it reaches the others.
                    losses.add(session.step, gradients(session))
                else:
                    session.samples.skip_step()
                    session.meter.totals.passed_over += 1
                session.checkpoints.hold()
                session.synchronize()
                session.average.update()
                session.optimizer.zero_grad(set_to_none=True)
                session.step += 1
                step, last = session.step, session.step == steps
                paused = last or any(every and step % every == 0 for every in pauses)
                if paused or session.saves.looks(step):
                    # A GPU has work left. The clock stands still below, so wait for it here.
                    losses.check()
                    session.catch_up()
                session.meter.step(units)

                _report(session, last)
                if step == min(FIRST, steps):
                    session.tell_fingerprint()
                if step % config.train.eval_every == 0 and not last:
                    session.evaluate()
                if session.saves.due(step):
                    session.save()
                if not last and stop(step):
                    losses.check()
                    session.catch_up()
                    session.meter.settle()
                    _stop(session)
                _admit(session)
        scores = session.evaluate()
        session.finish_saving()
        losses.check()
        summary = session.together(lambda: sum_up(session, scores))
        method.flush()
        session.together(run.barrier)
        run.record.finish(summary)


def _warn_of_late_means(run: Run) -> None:
    """Say what will never be averaged, because its first mean is due after the last step."""
    steps, firsts = run.config.train.steps, run.method.first_means()
    late = {what: first for what, first in firsts.items() if first > steps}
    if late:
        share = "no communication" if late == firsts else "not all communication"
        due = ", ".join(f"of {what} is due at step {first}" for what, first in late.items())
        text = f"warning: {share} will happen in time: the first mean {due}"
        run.console.print_line(f"{text}, and training ends at step {steps}")


def gradients(session: Session) -> Tensor:
    """Add up the gradients of this worker's micro-batches of a step. Returns their mean loss."""
    run, meter = session.run, session.meter
    train, accumulate = run.config.train, session.samples.accumulate
    with session.quorum.timed():
        loss = torch.zeros((), device=run.mesh.device)
        for micro in range(accumulate):
            with meter.waiting():
                batch = session.samples.next()
            with accumulating(session.model, last=micro == accumulate - 1):
                with session.autocast():
                    part = run.task.loss(session.model, batch) / accumulate
                part.backward()
            loss += part.detach()
            if micro < accumulate - 1 or session.step < train.steps - 1:  # training goes on
                with meter.waiting(hidden=session.samples.copies.still_busy()):
                    session.samples.prefetch()
        if train.clip_norm is not None:
            clip(session.module, train.clip_norm, session.replica.experts)
    return loss


def _report(session: Session, last: bool) -> None:
    """Say and write down what the step that has just ended brought."""
    run, meter, step = session.run, session.meter, session.step
    for text in run.method.notices():
        run.console.print_line(f"step {step}/{run.config.train.steps}  {text}")
        run.record.log(Notice(step, text))
    if run.config.trace:
        with meter.paused():  # starting a profiler and writing its file take seconds
            run.trace.step()
    metrics = None
    if step % run.config.log.every == 0 or last:
        with meter.paused():
            lr = session.optimizer.param_groups[0]["lr"]
            metrics = meter.interval(step, session.losses.check(), lr)
            if run.is_first and session.utilization is not None:
                metrics = session.utilization.seen_in(metrics, run.mesh.num_workers)
            run.record.log(metrics)
    run.console.progress(step, metrics)


def _stop(session: Session) -> NoReturn:
    """Save, and end. Raises `SystemExit`."""
    if not session.save_now():
        session.losses.check()
        raise SystemExit(1)
    text = f"stopped and saved at step {session.step}; the same command goes on from here"
    session.run.console.print_line(text)
    raise SystemExit(PREEMPTED)


def _admit(session: Session) -> None:
    """At the end of a step but the last, let waiting replicas in. With too few replicas save, and
    wait. Nothing happens where replicas do not come and go.

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
