"""SyncTrainer: transformers' Trainer, whose replicas a method of this library keeps in step.

    trainer = SyncTrainer(model, args, train_dataset=data, sync=co2.CO2(tau=12))
    trainer.train()

Started by torchrun, every process is a replica. It trains without DistributedDataParallel, and the
method's step takes the place of the optimizer's. Evaluations and saved models are of the consensus
of the replicas, and after `train` every process holds it. A checkpoint of Trainer's has a file more
for each replica, so that training goes on from it exactly.
"""

import copy
import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from co2.comm.collectives import check_plain
from co2.comm.mesh import Mesh
from co2.errors import require
from co2.integrations import adapter
from co2.methods.base import Method
from co2.methods.shared.worker_files import held, load_held, opened


class SyncTrainer(Trainer):
    """A `Trainer` with one argument more; the others are `Trainer`'s own.

    `Trainer` counts the labels of a step over all processes by default, which would wait for the
    network at every step. Here each replica counts its own, except under methods that average
    gradients.

    Args:
        sync: the method, new: it has prepared nothing. Each call of `train` begins with its
            configuration.
    Raises:
        ConfigError: a model that is wrapped already, or what cannot be combined with a method:
            DeepSpeed, Trainer's FSDP, several GPUs of one process, fp16, auto_find_batch_size. Or
            processes that do not know of each other, as without a GPU and use_cpu.
    """

    def __init__(self, *args: Any, sync: Method, **options: Any) -> None:
        adapter.check_method(sync)
        super().__init__(*args, **options)
        check_plain(self._module)
        whole = "a method works on whole weights; leave it out"
        for key, refused, hint in (
            ("deepspeed", self.is_deepspeed_enabled, whole),
            ("fsdp", self.is_fsdp_enabled, whole),
            ("n_gpu", self.args.n_gpu > 1, "start one process for each GPU, with torchrun"),
            ("fp16", self.args.fp16, "a step that is skipped would tear rounds apart; use bf16"),
            ("auto_find_batch_size", self.args.auto_find_batch_size, "replicas would differ"),
        ):
            require(not refused, f"args.{key}", getattr(self.args, key), hint)
        started = int(os.environ.get("WORLD_SIZE", "1"))
        hint = f"{started} processes were started, and each would train alone; give use_cpu=True"
        require(started == self.args.world_size, "args.use_cpu", self.args.use_cpu, hint)
        if not sync.averages_gradients:
            self.args = copy.copy(self.args)  # the caller may give his to another trainer
            self.args.average_tokens_across_devices = False
        self.sync = sync
        """The method; while `train` runs, the one that keeps its replicas in step."""
        self._training = False

    @property
    def _module(self) -> nn.Module:
        assert self.model is not None, "Trainer has refused to do without"
        return self.model

    # Any: Trainer's own, from which it takes what it has put there.
    @property
    def _accelerated(self) -> Any:
        """The optimizer, around which accelerate has put its own."""
        return self.optimizer

    def train(self, *args: Any, **options: Any) -> Any:
        """Trainer's. After an interruption each replica keeps its own weights; the next call begins
        with those of replica 0."""
        try:
            return super().train(*args, **options)
        finally:
            self._give_back()

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader[Any]]:
        prepared = self.accelerator.prepare_model
        # As if for evaluation: autocast and compilation, but no DistributedDataParallel.
        self.accelerator.prepare_model = partial(prepared, evaluation_mode=True)
        try:
            model, loader = super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        finally:
            self.accelerator.prepare_model = prepared
        self.sync, mesh = adapter.renewed(self.sync), Mesh.world(device=self.args.device)
        optimizer = self._accelerated.optimizer
        model = self.sync.prepare(model, optimizer, mesh, total_steps=max_steps)
        self._accelerated.optimizer = adapter.Stepping(self.sync)
        self._training = True
        if (folder := resume_from_checkpoint) is not None:
            name = adapter.file_name(mesh.worker)
            state = opened(self.sync, folder, name, "resume_from_checkpoint")
            load_held(self.sync, self._module, state)
        return model, loader

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self.sync.finish()
        self._give_back()
        return super()._finalize_training(*args, **options)

    def _give_back(self) -> None:
        """Put back the optimizer whose place the method has taken."""
        if self._training:
            self._accelerated.optimizer = self.sync.optimizer
            self._training = False

    def _shown(self) -> AbstractContextManager[None]:
        return self.sync.consensus() if self._training else nullcontext()

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Trainer's, on the consensus. Collective while `train` runs."""
        with self._shown():
            return super().evaluation_loop(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the consensus, as Trainer does. Collective while `train` runs."""
        with self._shown():
            super().save_model(*args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        adapter.put(held(self.sync, self._module), self.sync.mesh, Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The last file of a checkpoint. Replica 0 now deletes those of before, in which the others
        # may still write.
        self.accelerator.wait_for_everyone()
