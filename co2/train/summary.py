"""A run's final figures, from those of all its workers."""

import math
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from co2.comm.clocks import ExchangeTotals, overlap
from co2.comm.collectives import gathered
from co2.methods.base import MethodStats
from co2.record.metrics import Summary
from co2.task import Exchanging, Reading, ReadTotals
from co2.train.meters import Totals, ledger
from co2.train.session import Session


@dataclass(frozen=True)
class _Worker:
    """What one worker has taken."""

    totals: Totals
    throughput: float
    method: MethodStats
    inside: ExchangeTotals
    read: ReadTotals


def sum_up(session: Session, scores: dict[str, float]) -> Summary:
    """The final figures, with the metrics of the last evaluation. Collective: communication and
    bytes are means over the workers, training time and with it throughput are those of the
    slowest."""
    run, meter, task, config = session.run, session.meter, session.run.task, session.run.config
    own = _Worker(
        Totals(**meter.state_dict()),
        meter.throughput(),
        run.method.stats(),
        task.traffic(session.module) if isinstance(task, Exchanging) else ExchangeTotals(),
        task.read() if isinstance(task, Reading) else ReadTotals(),
    )
    workers = gathered(own, run.control)

    def mean(figure: str) -> float:
        return math.fsum(map(attrgetter(figure), workers)) / len(workers)

    steps = own.totals.steps
    comm_s = mean("method.comm_s")
    exposed_s = mean("method.exposed_s")
    train_s = max(one.totals.train_s for one in workers)
    throughput = min(one.throughput for one in workers)
    used = session.utilization if run.is_first else None
    made = [steps - one.totals.passed_over for one in workers]
    held = ledger(session.module, session.optimizer, run.method)
    return Summary(
        title=f"{config.task} · {config.method} · {config.tag} · seed {config.train.seed}",
        task=config.task,
        method=config.method,
        tag=config.tag,
        scale=config.scale,
        seed=config.train.seed,
        final={**scores},
        baselines={**task.baselines()},
        steps=steps,
        workers=len(workers),
        replica_size=run.mesh.replica_size,
        unit=task.unit,
        throughput=throughput,
        comm_s=comm_s,
        exposed_s=exposed_s,
        exposed_share=exposed_s / max(train_s, 1e-9),
        data_share=own.totals.data_s / max(train_s, 1e-9),
        overlap=overlap(comm_s, exposed_s),
        bytes_per_step=mean("method.bytes_sent") / max(steps, 1),
        train_s=train_s,
        wall_s=own.totals.wall_s,
        peak_memory_bytes=_peak_memory_bytes(run.mesh.device),
        extra_model_copies=run.method.extra_copies,
        memory=replace(held, average_bytes=session.average.nbytes),
        device=str(run.mesh.device),
        folder=os.path.relpath(run.folder),
        mfu=None if used is None else used.mfu(throughput / len(workers)),
        saving_s=max(one.totals.saving_s for one in workers),
        members=session.changes,
        steps_made=[] if config.launch.quorum is None else made,
        exchange=_exchange(session.step - session.began_at, mean),
        reading=_reading(mean),
        own={**own.method.own},
    )


def _exchange(steps: int, mean: Callable[[str], float]) -> dict[str, float | None]:
    """What the exchange inside replicas has taken in so many steps; empty where there is none."""
    bytes_sent = mean("inside.comm.bytes_sent")
    if not bytes_sent:
        return {}
    comm_s = mean("inside.comm.comm_s")
    exposed_s = mean("inside.comm.exposed_s")
    return {
        "comm_s": comm_s,
        "exposed_s": exposed_s,
        "behind_s": mean("inside.behind_s"),
        "overlap": overlap(comm_s, exposed_s),
        "bytes_per_step": bytes_sent / max(steps, 1),
    }


def _reading(mean: Callable[[str], float]) -> dict[str, float | None]:
    """What reading batches from disk has taken; empty where none are read."""
    needed_bytes = mean("read.needed_bytes")
    if not needed_bytes:
        return {}
    read_bytes = mean("read.read_bytes")
    return {
        "needed_bytes": needed_bytes,
        "read_bytes": read_bytes,
        "amplification": read_bytes / needed_bytes,
        "planning_s": mean("read.planning_s"),
        "plan_bytes": mean("read.plan_bytes"),
    }


def _peak_memory_bytes(device: torch.device) -> int:
    """Most memory this worker has held: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
