"""SyncStrategy: it trains as one's own loop does, goes on exactly, and shows the consensus."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import co2
from co2.methods import METHODS
from tests.integrations.replicas import called
from tests.methods.driver import SETTINGS

pytestmark = [
    pytest.mark.slow,  # imports seconds of another library
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning"),
]

STEPS = 12
"""Four rounds; epochs of two replicas have five steps."""
Weights = dict[str, Tensor]


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=drawn)
    return [(x, x.sum(0, keepdim=True)) for x in inputs]


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def fitted(sync: co2.Method, folder: str, dropout: float = 0.0, **more: Any) -> Any:
    """The module after a training, with its batches and losses. Any: of Lightning."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from co2.integrations.lightning import SyncStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(dropout)
            self.batches: list[Any] = []
            self.seen: list[float] = []
            self.validated: list[float] = []

        def training_step(self, batch: Any, number: int) -> Tensor:
            self.batches.append([part.clone() for part in batch])
            value = loss(self.net, batch)
            self.seen.append(value.item())
            return value

        def validation_step(self, batch: Any, number: int) -> None:
            self.validated.append(loss(self.net, batch).item())

        def configure_optimizers(self) -> Any:
            self.automatic_optimization = optimizers == 1
            made = [torch.optim.SGD(self.net.parameters(), lr=0.05) for _ in range(optimizers)]
            return made if optimizers > 1 else made[0]

    warnings.simplefilter("ignore")
    optimizers, resume = more.pop("optimizers", 1), more.pop("ckpt_path", None)
    every, shown = more.pop("save_every", 0), more.pop("save_shown", False)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    if shown:  # as validation ends
        once = {"every_n_epochs": 1, "save_on_train_epoch_end": False}
        saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, **once)
    trainer = Trainer(
        **{
            "strategy": SyncStrategy(sync),
            "accelerator": "cpu",
            "devices": 2,
            "max_steps": STEPS,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "gradient_clip_val": 0.5,
            "callbacks": [saves] if every or shown else [],
            "enable_checkpointing": bool(every or shown),
            **more,
        }
    )
    torch.manual_seed(5)
    module = Module()
    loaders = [torch.utils.data.DataLoader(samples(n), batch_size=4) for n in (40, 8)]
    trainer.fit(module, *loaders, ckpt_path=resume)
    return module


def method(name: str) -> co2.Method:
    return METHODS[name](METHODS[name].Config(**SETTINGS[name]))


def held(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


NAMES = ("allreduce", "slowmo", "co2", "co2_keep", "streaming_diloco")


def both_ways(folder: str) -> dict[str, tuple[Weights, Weights]]:
    """Final weights under SyncStrategy, and of the same batches in a loop of one's own."""
    found = {}
    for name in NAMES:
        module = fitted(method(name), folder)
        model, sync = net(), method(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = sync.prepare(model, optimizer, co2.Mesh.world(device="cpu"))
        for batch in module.batches:
            loss(wrapped, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            sync.step()
            optimizer.zero_grad()
        with sync.consensus():
            final = held(model)
        sync.flush()
        found[name] = held(module.net), final
    return found


def test_it_is_ones_own_loop(tmp_path: Path) -> None:
    ways = called(both_ways, tmp_path, 2, str(tmp_path / "out"))
    for found in ways:
        for name in NAMES:
            by_strategy, by_hand = found[name]
            torch.testing.assert_close(by_strategy, by_hand, rtol=1e-5, atol=1e-7, msg=name)
            torch.testing.assert_close(by_strategy, ways[0][name][0], rtol=0, atol=0)
            assert (by_strategy["0.weight"] - net().state_dict()["0.weight"]).abs().max() > 1e-3


def interrupted(folder: str) -> dict[str, Any]:
    """Weights and losses of a whole training, and of one that goes on after an epoch, which is
    where Lightning goes on exactly; and the weights of a training without validation."""
    found = {}
    for name in NAMES:
        place, kinds = f"{folder}/{name}", {"save_every": 5, "save_shown": True}
        blind = held(fitted(method(name), place).net)
        for kind, value in kinds.items():
            more = {kind: value, "limit_val_batches": 1.0, "val_check_interval": 5}
            whole = fitted(method(name), f"{place}/{kind}", **more)
            again = fitted(
                method(name), f"{place}/{kind}", ckpt_path=f"{place}/{kind}/step=5.ckpt", **more
            )
            runs = [(held(one.net), one.seen, one.validated) for one in (whole, again)]
            found[f"{name} {kind}"] = (*runs, blind)
    return found


def test_it_goes_on_exactly_and_validation_changes_nothing(tmp_path: Path) -> None:
    """From a checkpoint of training, and from one that was written while the consensus is shown."""
    for found in called(interrupted, tmp_path, 2, str(tmp_path / "out")):
        for name, ((weights, told, seen), (others, theirs, theirs_seen), blind) in found.items():
            assert told[-len(theirs) :] == theirs and len(theirs) == STEPS - 5, name
            assert seen[-len(theirs_seen) :] == theirs_seen and theirs_seen
            torch.testing.assert_close(weights, others, rtol=0, atol=0, msg=name)
            torch.testing.assert_close(weights, blind, rtol=0, atol=0, msg=name)


def saved(folder: str) -> list[tuple[Weights, Weights]]:
    """What training leaves after two epochs, and what the checkpoint of that moment holds."""
    found = []
    for more in ({"save_every": 5}, {"save_shown": True, "limit_val_batches": 1.0}):
        place = f"{folder}/{len(found)}"
        module = fitted(method("co2"), place, max_steps=10, **more)
        state = torch.load(f"{place}/step=10.ckpt", weights_only=False)["state_dict"]
        found.append((held(module), state))
    return found


def test_checkpoints_hold_the_consensus(tmp_path: Path) -> None:
    for found in called(saved, tmp_path, 2, str(tmp_path / "out")):
        for left, state in found:
            torch.testing.assert_close(state, left, rtol=0, atol=0)


def refused(folder: str) -> list[str]:
    from lightning.pytorch.plugins import MixedPrecision

    from co2.integrations.lightning import SyncStrategy

    lines = []
    half = MixedPrecision("16-mixed", "cpu")
    for more in ({"optimizers": 2}, {"plugins": [half]}):
        with pytest.raises(co2.ConfigError) as error:
            fitted(method("co2"), folder, **more)
        lines.append(str(error.value))
    fitted(method("co2"), folder, save_every=5)
    path = Path(folder) / "step=5.ckpt"
    for file in path.with_name("step=5.ckpt.sync").glob("*.pt"):
        file.write_bytes(file.read_bytes()[:100])
    torch.distributed.barrier()
    with pytest.raises(co2.ConfigError) as error:
        fitted(method("co2"), folder, ckpt_path=str(path))
    lines.append(str(error.value))
    with pytest.raises(co2.ConfigError) as error:
        SyncStrategy("co2")  # type: ignore[arg-type]
    return [*lines, str(error.value)]


def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    for lines in called(refused, tmp_path, 2, str(tmp_path / "out")):
        words = ("configure_optimizers=2: ", "precision=16-mixed: ", "cannot be read", "sync=str: ")
        assert len(lines) == len(words)
        for line, word in zip(lines, words, strict=True):
            assert word in line and "\n" not in line
