"""build: the session of a run. The order counts: a line needs what those before it have done."""

from functools import partial

import torch
from torch import nn

from co2.config import Config
from co2.record.fingerprint import digest
from co2.record.folder import begun
from co2.train import init_from
from co2.train.run import Run
from co2.train.schedule import largest_lr
from co2.train.session import Session
from co2.train.within_replica import CUT, Replica, checkpoint_activations, compile_model


def build(run: Run) -> Session:
    """Build the session of a run, from its start or its last checkpoint on. Collective.

    Raises:
        ConfigError: a model that the settings do not fit, weights of `init_from` or a checkpoint
            that cannot be used.
    """
    config, mesh, method, steps = run.config, run.mesh, run.method, run.config.train.steps
    module: nn.Module = run.task.model().to(mesh.device)
    weights = digest(module.state_dict())
    if config.init_from is not None and not begun(run.folder):
        init_from.load(config.init_from, module, run.task)
    replica = Replica(config.mesh, mesh, method.averages_gradients)
    replica.synchronize_batch_norm(module)
    tune_convolutions(module, mesh.device, config)
    if config.train.compile:
        compile_model(module, config.mesh.strategy)
    if config.train.checkpoint_activations:
        checkpoint_activations(module)
    replica.shard(module, config.train.precision)
    optimizer = replica.optimizer(run.task.optimizer(module))
    schedule = partial(largest_lr, optimizer, config.optim, steps)
    prepared = method.prepare(module, optimizer, mesh, schedule, not mesh.newcomer, steps)
    method.tell_no_end()
    model = replica.wrap(prepared, config.comm)
    session = Session(run, module, model, optimizer, replica, weights)
    replicas = session.replicas
    if replicas is not None:
        replicas.begin(session.changed)
    if replicas is not None and mesh.newcomer:
        replicas.receive_state(session.checkpoints.finish, session.load_given, run.control)
    else:
        session.resume()
    session.began_at = session.step
    session.samples.begin()
    if run.is_first:
        session.utilization  # noqa: B018 — counted now, not in the midst of training
    session.meter.begin()
    session.saves.begin(session.step)
    return session


def tune_convolutions(module: nn.Module, device: torch.device, config: Config) -> None:
    """On a GPU, lay out four-dimensional weights channels last, as tensor cores read them, and let
    cuDNN try its algorithms for every new shape, unless the run is deterministic. Activations
    follow the weights' layout.

    fully_shard takes contiguous weights only, so under its strategies the layout stays. So it does
    where activations are computed again in compiled code, which stopped on an H200 with torch 2.11:
    it expected contiguous gradients.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not config.train.deterministic
        again = config.train.compile and config.train.checkpoint_activations
        if config.mesh.strategy not in CUT and not again:
            module.to(memory_format=torch.channels_last)
