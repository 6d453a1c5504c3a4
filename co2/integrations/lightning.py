"""SyncStrategy: Lightning's Trainer, whose replicas a method of this library keeps in step.

    strategy = SyncStrategy(co2.CO2(co2.CO2.Config(tau=12)))
    Trainer(strategy=strategy, devices=2, accelerator="cpu").fit(module, data)

Every process is a replica. It trains without DistributedDataParallel, and the method's step takes
the place of the optimizer's. Validation and checkpoints are of the consensus of the replicas, and
after `fit` every process holds it. Beside a checkpoint FILE lies a folder FILE.sync with a file for
each replica, so that training goes on from it exactly.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from co2.comm.mesh import Mesh
from co2.errors import require
from co2.integrations import loops
from co2.methods.base import Method


class SyncStrategy(DDPStrategy):
    """How Lightning's Trainer trains replicas under a method.

    Args:
        sync: the method, new: it has prepared nothing. Each `fit` begins with its configuration.
        options: what `DDPStrategy` takes about processes, such as `process_group_backend`.
    Raises:
        ConfigError: `sync` is no such method. `fit` raises it for several optimizers, for
            precision="16-mixed", and for a checkpoint of another number of replicas.
    """

    def __init__(self, sync: Method, **options: Any) -> None:
        loops.check_method(sync)
        super().__init__(**options)
        self.sync = sync
        """The method; during `fit` the one that keeps its replicas in step."""
        self._fitting = False
        self._shown: AbstractContextManager[None] | None = None
        """The consensus, while validation looks at it."""
        self._checkpoint: Path | None = None

    def configure_ddp(self) -> None:
        """The method keeps replicas in step, in `setup`."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        count = len(self.optimizers)
        require(count == 1, "configure_optimizers", count, "a method takes one optimizer")
        hint = "a step that is skipped would tear rounds apart; use bf16-mixed"
        precision = self.precision_plugin.precision
        require(precision != "16-mixed", "precision", precision, hint)
        assert self.model is not None
        self.sync = loops.renewed(self.sync)
        mesh = Mesh.world(device=self.root_device)
        self.model = self.sync.prepare(self.model, self.optimizers[0], mesh)
        self._fitting = True

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **options: Any,
    ) -> Any:
        """The method's step, after the closure has made the gradients."""
        # Only steps are asked of it.
        stepping: Any = loops.Stepping(self.sync)
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
        loops.end(self.sync, self._module)
        self._fitting = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus. Collective during `fit`."""
        if not self._fitting or self._shown is not None:
            return super().lightning_module_state_dict()
        with self.sync.consensus():
            live = super().lightning_module_state_dict()
            return {name: value.clone() for name, value in live.items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        if self._fitting:
            with self._as_trained():
                loops.write(self.sync, self._module, _beside(Path(filepath)))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(Path(filepath)), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> Any:
        self._checkpoint = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on with what this replica had when the checkpoint was written."""
        assert self._checkpoint is not None
        loops.read(self.sync, self._module, _beside(self._checkpoint), "ckpt_path")

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


def _beside(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".sync")
