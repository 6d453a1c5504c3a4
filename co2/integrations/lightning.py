"""SyncStrategy: Lightning's Trainer, whose replicas a method of this library keeps in step.

    strategy = SyncStrategy(co2.CO2(tau=12))
    Trainer(strategy=strategy, devices=2, accelerator="cpu").fit(module, data)

Every process is a replica. It trains without DistributedDataParallel, and the method's step takes
the place of the optimizer's. Validation and checkpoints are of the consensus of the replicas, and
after `fit` every process holds it, or the weights that callbacks have left. Beside a checkpoint
FILE lies a folder FILE.sync with a file for each replica, so that training goes on from it exactly.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.mesh import Mesh
from co2.errors import require
from co2.integrations import adapter
from co2.methods.base import Method
from co2.methods.shared.worker_files import held, load_held, opened


class SyncStrategy(DDPStrategy):
    """How Lightning's Trainer trains replicas under a method.

    Args:
        sync: the method, new: it has prepared nothing. Each `fit` begins with its configuration.
        options: what `DDPStrategy` takes about processes, such as `process_group_backend`.
    Raises:
        ConfigError: `sync` is no such method. `fit` raises it for several optimizers or none, for
            precision="16-mixed", and for a checkpoint of another number of replicas.
    """

    def __init__(self, sync: Method, **options: Any) -> None:
        adapter.check_method(sync)
        super().__init__(**options)
        self.sync = sync
        """The method; during `fit` the one that keeps its replicas in step."""
        self._fitting = False
        self._ending = False
        """Whether training has ended, but callbacks may still write its final weights."""
        self._trainer: Trainer | None = None
        """The one that fits."""
        self._end_first: Callback | None = None
        """Its callback that ends training before other callbacks do, so that weights that these
        write stay."""
        self._shown: AbstractContextManager[None] | None = None
        """The consensus, while validation looks at it."""
        self._given: dict[str, Any] | None = None
        """The weights that `lightning_module_state_dict` returned last."""
        self._ended: dict[str, Any] | None = None
        """What this replica held as training ended, to go on from."""
        self._left: list[int] = []
        """The checksums of the weights that the end of training has left."""
        self._checkpoint = ""

    def configure_ddp(self) -> None:
        """The method keeps replicas in step, in `setup`."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        self._ended = None
        count, precision = len(self.optimizers), self.precision_plugin.precision
        require(count == 1, "configure_optimizers", count, "a method takes one optimizer")
        hint = "returned no optimizer, and a method needs one; train without a SyncStrategy"
        mock = isinstance(self.optimizers[0], _MockOptimizer)
        require(not mock, "configure_optimizers", None, hint)
        hint = "a step that is skipped would tear rounds apart; use bf16-mixed"
        require(precision != "16-mixed", "precision", precision, hint)
        assert self.model is not None
        self.sync = adapter.renewed(self.sync)
        mesh = Mesh.world(device=self.root_device)
        steps = trainer.estimated_stepping_batches
        known = int(steps) if 0 < steps < math.inf else None
        self.model = self.sync.prepare(self.model, self.optimizers[0], mesh, total_steps=known)
        self._trainer, self._fitting = trainer, True
        self._end_first = LambdaCallback(on_train_end=lambda *_: self._end())
        _callbacks(trainer).insert(0, self._end_first)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **options: Any,
    ) -> Any:
        """The method's step, after the closure has made the gradients."""
        stepping: Any = adapter.Stepping(self.sync)  # only steps are asked of it
        return super().optimizer_step(stepping, closure, model, **options)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._fitting:
            self._show()

    def on_validation_end(self) -> None:
        self._hide()
        super().on_validation_end()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._ending:  # not so after the trial of a LearningRateFinder
            self._agree()
            self._ending = False

    def teardown(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None and self._end_first is not None:
            if self._fitting and not trainer.interrupted:  # there was no step left to train
                self._end()
            self._hide()  # after an error in validation
            self._fitting = self._ending = False
            _callbacks(trainer).remove(self._end_first)
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus. Collective during `fit`."""
        if self._ending:
            self._agree()
        if not self._fitting or self._shown is not None:
            self._given = super().lightning_module_state_dict()
        else:
            with self.sync.consensus():
                live = super().lightning_module_state_dict()
                self._given = {name: value.clone() for name, value in live.items()}
        return self._given

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save what every replica needs to go on, and the checkpoint. Collective."""
        if "optimizer_states" in checkpoint:  # not so with weights_only
            with self._as_trained():
                state = self._held()
                if state is not None:
                    state["step"] = checkpoint["global_step"]
                    path = f"{_beside(filepath)}/{adapter.file_name(self.global_rank)}"
                    self.checkpoint_io.save_checkpoint(state, path, storage_options)
        weights, given = checkpoint.get("state_dict", {}), self._given or {}
        self._given = None
        changed = any(value is not given.get(name) for name, value in weights.items())
        trained = self._fitting or self._ended is not None
        if trained and self.reduce_boolean_decision(changed):  # by averages over a replica's steps
            checkpoint = {**checkpoint, "state_dict": {**weights, **self._means(weights)}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(_beside(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> Any:
        self._checkpoint = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on with what this replica had when the checkpoint was written."""
        folder, target = _beside(self._checkpoint), _beside(os.path.realpath(self._checkpoint))
        if os.path.islink(self._checkpoint) and os.path.isdir(target):
            folder = target
        load = partial(self.checkpoint_io.load_checkpoint, weights_only=True)
        name, step = adapter.file_name(self.global_rank), checkpoint["global_step"]
        state = opened(self.sync, folder, name, "ckpt_path", load, step)
        load_held(self.sync, self._module, state)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or another process, whose method has prepared nothing."""
        state = super().__getstate__() | {"sync": adapter.renewed(self.sync)}
        state |= dict.fromkeys(("_fitting", "_ending"), False)
        return state | dict.fromkeys(("_shown", "_given", "_trainer", "_end_first"))

    def _held(self) -> dict[str, Any] | None:
        """What this replica needs to go on exactly; None if nothing has been trained. Without
        module and method if somebody has set other weights after `fit`: those begin anew."""
        if self._fitting:
            return held(self.sync, self._module)
        if self._ended is None:
            return None
        ended = {**self._ended, "optimizer": self.optimizers[0].state_dict()}
        if adapter.checksums(self._module) != self._left:  # set by somebody
            del ended["module"], ended["sync"]  # of other weights
        return ended

    def _end(self) -> None:
        """Leave the consensus in the module, and keep what there was."""
        ended = held(self.sync, self._module)
        del ended["optimizer"]  # it stays where it is
        copies = {name: value.to("cpu", copy=True) for name, value in ended["module"].items()}
        self._ended = {**ended, "module": copies}
        self.sync.finish()
        self._left = adapter.checksums(self._module)
        self._fitting, self._ending = False, True

    def _agree(self) -> None:
        """Average the final weights over the replicas, if callbacks have changed them."""
        written = adapter.checksums(self._module) != self._left
        if self.reduce_boolean_decision(written, all=False):
            final = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
            with torch.no_grad():
                for name, mean in self._means(final).items():
                    final[name].copy_(mean)

    def _means(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means over the replicas of the weights that a consensus averages. Collective."""
        frozen = {name for name, one in self._module.named_parameters() if not one.requires_grad}
        means = {}
        for name, value in weights.items():
            if torch.is_tensor(value) and value.is_floating_point() and name not in frozen:
                dense = value.detach().clone(memory_format=torch.contiguous_format)
                means[name] = self.reduce(dense.to(self.root_device)).to(value.device)
        return means

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "the trainer has one"
        return self.lightning_module

    def _show(self) -> None:
        self._shown = self.sync.consensus()
        self._shown.__enter__()

    def _hide(self) -> None:
        if self._shown is not None:
            shown, self._shown = self._shown, None
            shown.__exit__(None, None, None)

    @contextmanager
    def _as_trained(self) -> Iterator[None]:
        """Inside, the module holds what this replica has trained: checkpoints are also written
        while the consensus is shown."""
        again = self._shown is not None
        self._hide()
        yield
        if again:
            self._show()


def _callbacks(trainer: Trainer) -> list[Callback]:
    """The trainer's own list, which its class does not declare."""
    found: list[Callback] = vars(trainer)["callbacks"]
    return found


def _beside(checkpoint: str | Path) -> str:
    return f"{checkpoint}.sync"
