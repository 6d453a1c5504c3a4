"""The final figures of a run."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from co2.comm.clocks import ExchangeTotals, overlap
from co2.comm.waiting import until_cut
from co2.record.metrics import Summary
from co2.task import Exchanging, Reading, ReadTotals
from co2.train.meters import ledger, peak_memory_bytes
from co2.train.run import Run

if TYPE_CHECKING:
    from co2.train.session import Session


def sum_up(session: "Session", scores: dict[str, float]) -> Summary:
    """The final figures, with the metrics of the last evaluation. Collective: communication and
    bytes are means over the workers, training time and with it throughput are those of the
    slowest."""
    run, totals, stats = session.run, session.meter.state_dict(), session.run.method.stats()
    config, task, steps = run.config, run.task, max(totals["steps"], 1)
    inside = task.traffic(session.module) if isinstance(task, Exchanging) else ExchangeTotals()
    read = task.read() if isinstance(task, Reading) else ReadTotals()
    figures = [
        *(stats.comm_s, stats.exposed_s, stats.bytes_sent),
        *(inside.comm.comm_s, inside.comm.exposed_s, inside.comm.bytes_sent, inside.behind_s),
        *(read.needed_bytes, read.read_bytes, read.planning_s, read.plan_bytes),
    ]
    means = torch.tensor(figures, dtype=torch.float64)
    longest = [totals["train_s"], -session.meter.throughput(), totals["saving_s"]]
    slowest = torch.tensor(longest, dtype=torch.float64)
    if run.control is not None:
        until_cut(lambda: dist.all_reduce(means, op=dist.ReduceOp.AVG, group=run.control))
        until_cut(lambda: dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=run.control))
    comm_s, exposed_s, bytes_sent, *others = means.tolist()
    held = ledger(session.module, session.optimizer, run.method)
    train_s, throughput, saving_s = slowest[0].item(), -slowest[1].item(), slowest[2].item()
    return Summary(
        title=f"{config.task} · {config.method} · {config.tag} · seed {config.train.seed}",
        task=config.task,
        method=config.method,
        tag=config.tag,
        scale=config.scale,
        seed=config.train.seed,
        final={**scores},
        baselines={**task.baselines()},
        steps=totals["steps"],
        workers=run.mesh.num_workers,
        replica_size=run.mesh.replica_size,
        unit=task.unit,
        throughput=throughput,
        comm_s=comm_s,
        exposed_s=exposed_s,
        exposed_share=exposed_s / max(train_s, 1e-9),
        data_share=totals["data_s"] / max(train_s, 1e-9),
        overlap=overlap(comm_s, exposed_s),
        bytes_per_step=bytes_sent / steps,
        train_s=train_s,
        wall_s=totals["wall_s"],
        peak_memory_bytes=peak_memory_bytes(run.mesh.device),
        extra_model_copies=run.method.extra_copies,
        memory=replace(held, average_bytes=session.average.nbytes),
        device=str(run.mesh.device),
        folder=os.path.relpath(run.folder),
        mfu=_mfu(session, throughput),
        saving_s=saving_s,
        members=[change.line() for change in session.changes],
        steps_made=_steps_made(run, totals["steps"] - totals["passed_over"]),
        exchange=_exchange(session.step - session.began_at, *others[:4]),
        reading=_reading(*others[4:]),
        own={**stats.own},
    )


def _mfu(session: "Session", throughput: float) -> float | None:
    run = session.run
    if not run.is_first or session.utilization is None:
        return None
    return session.utilization.mfu(throughput / run.mesh.num_workers)


def _steps_made(run: Run, own: int) -> list[int]:
    """How many steps each replica has made; empty without launch.quorum. Collective."""
    if run.config.launch.quorum is None:
        return []
    made = [torch.tensor(own) for _ in range(run.mesh.num_workers)]
    if run.control is not None:
        until_cut(lambda: dist.all_gather(made, torch.tensor(own), group=run.control))
    return [int(one) for one in made]


def _exchange(
    steps: int, comm_s: float, exposed_s: float, bytes_sent: float, behind_s: float
) -> dict[str, float | None]:
    if not bytes_sent:
        return {}
    return {
        "comm_s": comm_s,
        "exposed_s": exposed_s,
        "behind_s": behind_s,
        "overlap": overlap(comm_s, exposed_s),
        "bytes_per_step": bytes_sent / max(steps, 1),
    }


def _reading(
    needed_bytes: float, read_bytes: float, planning_s: float, plan_bytes: float
) -> dict[str, float | None]:
    if not needed_bytes:
        return {}
    return {
        "needed_bytes": needed_bytes,
        "read_bytes": read_bytes,
        "amplification": read_bytes / needed_bytes,
        "planning_s": planning_s,
        "plan_bytes": plan_bytes,
    }
