"""SyncTrainer: torchtitan's Trainer, whose replicas a method of this library keeps in step.

    config = llama3_debugmodel()
    config.parallelism.data_parallel_replicate_degree = 2
    trainer = SyncTrainer(config, sync=co2.CO2(tau=12))
    trainer.train()
    trainer.close()

torchtitan's own configuration says how many replicas there are (`data_parallel_replicate_degree`)
and how the workers of one share it (`data_parallel_shard_degree`, `tensor_parallel_degree`).
torchtitan is built for the workers of one replica, which have adjacent ranks: what it adds up, such
as gradients, losses and tokens, stays inside, and what it logs is of replica 0. The method's step
takes the place of the optimizer's. Each replica draws its own share of the data. Under AllReduce
torchtitan trains as it does alone, by FSDP2 in hybrid mode.

Validation and checkpoints are of the consensus of the replicas: the means of their weights, and in
checkpoints of their optimizers' tensors. torchtitan alone can read these. In a checkpoint's folder
lies a file more for each worker, so that training goes on from it exactly. After `train` every
replica holds the consensus.

Tested on CPUs under gloo, with two replicas of two workers, under FSDP2 and tensor parallelism.
torchtitan 0.3 itself knows no CPU: the tests tell it of one, and give it another attention, another
meter of memory and a barrier. Not run: CUDA and NCCL, CUDA graphs, compilation, bf16, checkpoints
that are written in the background, context parallelism, other models than Llama 3.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as titan
from torchtitan.trainer import Trainer

from co2.comm.collectives import averaged, local
from co2.comm.mesh import Mesh
from co2.config import CommDevice
from co2.errors import require
from co2.integrations import adapter
from co2.methods.base import Method
from co2.methods.shared.worker_files import opened

_REPLICAS = "parallelism.data_parallel_replicate_degree"


class SyncTrainer(Trainer):
    """A `Trainer` with one argument more.

    Args:
        config: torchtitan's; it stays as it is. Its global batch is that of all replicas.
        sync: the method, new: it has prepared nothing.
    Raises:
        ConfigError: processes or a batch that the replicas cannot share; or what cannot be combined
            with a method: pipeline or expert parallelism, several optimizers, hooks of
            torchtitan's optimizers, as for the balance of experts. `train` raises it for a
            checkpoint of another method or number of replicas.
    """

    # Any: torchtitan's own, in whose place others are put.
    optimizers: Any
    checkpointer: Any
    validator: Any

    def __init__(self, config: Trainer.Config, *, sync: Method) -> None:
        adapter.check_method(sync)
        self.sync = sync
        """The method; from `train` on it keeps the replicas in step."""
        self._replicas = config.parallelism.data_parallel_replicate_degree
        for key in ("pipeline_parallel_degree", "expert_parallel_degree"):
            degree = getattr(config.parallelism, key)
            require(
                degree == 1, f"parallelism.{key}", degree, "a method does not support it; use 1"
            )
        super().__init__(config if sync.averages_gradients else self._inside(config))
        self.container = self.optimizers
        """torchtitan's own, around the optimizer."""
        count = len(self.container)
        require(count == 1, "optimizer.param_groups", count, "a method takes one kind of optimizer")
        hooked = len(self.container._optimizer_step_pre_hooks)
        hint = "a method would not call its hooks, such as the balance of experts"
        require(hooked == 0, "optimizer", f"{hooked} hooks", hint)
        self.optimizers = adapter.Stepping(sync)
        self.checkpointer = _Checkpoints(self, self.checkpointer)
        if config.validator.enable:
            self.validator = _Validator(self, self.validator)

    def _inside(self, config: Trainer.Config) -> Trainer.Config:
        """The configuration of one replica."""
        batch = config.training.global_batch_size
        hint = f"must be a multiple of the {self._replicas} replicas"
        require(batch < 0 or batch % self._replicas == 0, "training.global_batch_size", batch, hint)
        return replace(
            config,
            parallelism=replace(config.parallelism, data_parallel_replicate_degree=1),
            training=replace(config.training, global_batch_size=max(-1, batch // self._replicas)),
            dataloader=_Share(self, config.dataloader),
        )

    def init_distributed(self) -> ParallelDims:
        """Start torch.distributed, and say how the workers of one replica share it."""
        config = self.config
        offload, folder = config.training.enable_cpu_offload, config.dump_folder
        workers = titan.init_distributed(
            config.comm, enable_cpu_backend=offload, base_folder=folder
        )
        require(workers % self._replicas == 0, _REPLICAS, self._replicas, f"must divide {workers}")
        self.mesh = Mesh.world(workers // self._replicas, self.device)
        self._check_shards()
        if self.sync.averages_gradients:
            return ParallelDims.from_config(config.parallelism, workers)
        return _Inside.from_config(config.parallelism, self.mesh.replica_size)

    def _check_shards(self) -> None:
        if self.mesh.replica_size == 1:
            return
        reason = self.sync.refusals().get("mesh.strategy=zero3")
        name = self.sync.registered_name()
        require(reason is None, "sync", name, f"{reason}; take replicas of one worker")
        hint = "gloo would have to carry the gradients inside a replica too; use auto"
        device = self.sync.comm.device
        require(device is CommDevice.auto, "comm.device", device.value, hint)

    @property
    def module(self) -> nn.Module:
        """The model, of which each worker of a replica has shards."""
        (module,) = self.model_parts
        return module

    def weights(self) -> dict[str, Tensor]:
        """The parameters and saved buffers themselves. A state dict of torchtitan's may have pieces
        of them in their place."""
        saved = self.module.state_dict()
        buffers = {name: one for name, one in self.module.named_buffers() if name in saved}
        return dict(self.module.named_parameters()) | buffers

    def prepare(self) -> None:
        """Let the method begin with the weights that there are. Collective."""
        (optimizer,) = self.container
        steps = self.config.training.steps
        prepared = self.sync.prepare(self.module, optimizer, self.mesh, total_steps=steps)
        assert prepared is self.module, "its parameters are DTensors, which no method wraps"

    def train(self) -> None:
        """torchtitan's. It ends with the consensus in every replica."""
        super().train()
        self.sync.finish()


class _Around:
    """Wraps a component of torchtitan's, which has all attributes that are not defined here."""

    def __init__(self, trainer: SyncTrainer, plain: Any) -> None:
        self._trainer, self._plain = trainer, plain

    # Any: whatever the component has.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _Share(_Around):
    """The configuration of a loader, which takes this replica's share of the data."""

    # Any: as torchtitan passes it.
    def build(self, *, dp_world_size: int, dp_rank: int, **options: Any) -> Any:
        mesh = self._trainer.mesh
        rank, world = mesh.replica * dp_world_size + dp_rank, mesh.num_replicas * dp_world_size
        return self._plain.build(dp_world_size=world, dp_rank=rank, **options)


class _Validator(_Around):
    """It validates the consensus, in every replica the whole."""

    def validate(self, *args: Any, **options: Any) -> None:
        with self._trainer.sync.consensus():
            self._plain.validate(*args, **options)


class _Checkpoints(_Around):
    """torchtitan's checkpoints, which hold the consensus, and beside them what each worker needs to
    go on exactly."""

    def load(self, step: int = -1) -> bool:
        """Load as torchtitan does, and begin with that, or go on exactly. Collective."""
        trainer = self._trainer
        loaded: bool = self._plain.load(step)
        trainer.prepare()
        if trainer.step > 0:
            folder, key = self._folder(trainer.step), "checkpoint.load_step"
            name = adapter.file_name(trainer.mesh.worker)
            state = opened(trainer.sync, folder, name, key, step=trainer.step)
            then, now = state["replica_size"], trainer.mesh.replica_size
            hint = f"is of replicas of {then} workers, not of {now}; start as many"
            require(then == now, key, folder, hint)
            _put(trainer.weights(), state["module"])
            trainer.container.load_state_dict(
                _put(trainer.container.state_dict(), state["optimizer"])
            )
            trainer.sync.load_state_dict(state["sync"])
        return loaded

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save as torchtitan does, where it is due. Collective."""
        plain, trainer = self._plain, self._trainer
        if not plain.enable or not plain._should_save(curr_step, last_step):
            return False
        inner = trainer.container.state_dict()
        if not (last_step and plain.last_save_model_only):
            state = {
                "replicas": trainer.mesh.num_replicas,
                "replica_size": trainer.mesh.replica_size,
                "step": curr_step,
                "module": _locals(trainer.weights()),
                "optimizer": _locals(inner),
                "sync": trainer.sync.state_dict(),
            }
            adapter.put(state, trainer.mesh, self._folder(curr_step))
        tensors = [value for value in _locals(inner).values() if torch.is_tensor(value)]
        with trainer.sync.consensus(), averaged(tensors, trainer.sync.group):
            saved: bool = plain.save(curr_step, last_step)
            plain.maybe_wait_for_staging()
        return saved

    def _folder(self, step: int) -> Path:
        return Path(self._plain.folder, f"step-{step}")


class _Inside(ParallelDims):
    """How the workers of one replica share it, for each of several replicas."""

    def build_mesh(self) -> DeviceMesh:
        """Build torchtitan's meshes over the workers of this replica. Collective."""
        shape = (dist.get_world_size() // self.world_size, self.world_size)

        def inside(device: str, *_: Any, **__: Any) -> DeviceMesh:
            return init_device_mesh(device, shape, mesh_dim_names=("replica", "world"))["world"]

        # torchtitan takes all workers for one replica, and has no argument that would say less.
        with patch.object(parallel_dims, "init_device_mesh", inside):
            return super().build_mesh()


def _locals(state: Mapping[str, Any]) -> dict[str, Any]:
    """What this worker holds of a state, by reference. Any: tensors and plain values."""
    return {
        name: local(value.detach()) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _put(live: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Copy into the tensors of a state what `_locals` has found in them. Returns the state with the
    plain values that were saved. Any: tensors and plain values."""
    for name, value in _locals(live).items():
        if isinstance(value, Tensor):
            value.copy_(saved[name])
        else:
            live[name] = saved[name]
    return live
