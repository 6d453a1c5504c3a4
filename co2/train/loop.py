"""The training loop, from top to bottom."""

from contextlib import closing

import torch

from co2.errors import PREEMPTED
from co2.record.metrics import Notice
from co2.train.launch import STOP_SIGNALS
from co2.train.losses import LossWatch
from co2.train.randomness import seed_everything
from co2.train.replica import accumulating
from co2.train.run import Run
from co2.train.schedule import set_lr
from co2.train.session import Session
from co2.train.stop import StopVote
from co2.train.summary import sum_up


def train(run: Run) -> None:
    """Train a run to its end, or to where it is told to stop. Every worker calls this.

    Raises:
        SystemExit: `PREEMPTED` when the run was told to stop and has saved, 1 when it could not
            save; `DIVERGED` when a loss is not finite.
    """
    config, task, method = run.config, run.task, run.method
    steps, due = config.train.steps, config.checkpoint.every
    seed_everything(config.train.seed, run.mesh.worker)
    with run, closing(Session(run)) as session:
        module, model, optimizer = session.module, session.model, session.optimizer
        meter, quorum = session.meter, session.quorum
        samples, membership = session.samples, session.membership
        losses = LossWatch(run, session.checkpoints)
        run.record.begin(session.step)
        run.trace.begin(method.round_steps)
        with StopVote(run.mesh, run.control, lambda: method.max_skew_steps, STOP_SIGNALS) as stop:
            while session.step < steps:
                set_lr(optimizer, config.optim, session.step, steps)
                accumulate, units = samples.accumulate, session.units
                if quorum.makes(session.step):
                    with quorum.timed():
                        loss = torch.zeros((), device=run.mesh.device)
                        for micro in range(accumulate):
                            with meter.waiting():
                                batch = samples.next()
                            with accumulating(model, last=micro == accumulate - 1):
                                with session.autocast():
                                    part = task.loss(model, batch) / accumulate
                                part.backward()
                            loss += part.detach()
                        if config.train.clip_norm is not None:
                            session.replica.clip(module, config.train.clip_norm)
                    # On a CPU this ends a bad step before it reaches the others.
                    losses.add(session.step, loss)
                else:
                    session.pass_over()
                membership.synchronize()
                optimizer.zero_grad(set_to_none=True)
                session.step += 1
                meter.step(units)

                step, last = session.step, session.step == steps
                for text in method.notices():
                    run.console.print_line(f"step {step}/{steps}  {text}")
                    run.record.log(Notice(step, text))
                if run.trace.active:
                    with meter.paused():  # starting a profiler and writing its file take seconds
                        run.trace.step()
                metrics = None
                if step % config.log.every == 0 or last:
                    with meter.paused():
                        lr = optimizer.param_groups[0]["lr"]
                        metrics = meter.interval(step, losses.check(), lr)
                        run.record.log(metrics)
                run.console.progress(step, metrics)
                if step % config.train.eval_every == 0 and not last:
                    session.evaluate()
                if due > 0 and (step % due == 0 or last):
                    losses.check()
                    session.save()
                if not last and stop():
                    stop.drain()
                    losses.check()
                    if not session.save_now():
                        raise SystemExit(1)
                    text = f"stopped and saved at step {step}; the same command goes on from here"
                    run.console.print_line(text)
                    raise SystemExit(PREEMPTED)
                membership.change()
            stop.drain()
        scores = session.evaluate()
        session.finish_saving()
        summary = membership.together(lambda: sum_up(session, scores))
        method.flush()
        membership.together(run.barrier)
        run.record.finish(summary)
