"""SyncStrategy: it trains as one's own loop does, goes on exactly, and shows the consensus."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import co2
from tests.integrations.replicas import BLOCKING, Weights, called, held, method, refusal

pytestmark = [
    pytest.mark.slow,  # imports seconds of another library
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning"),
]

STEPS = 12
"""Four rounds; epochs of two replicas have five steps."""


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
    """The module after a training, with its batches and losses. Any: of Lightning.

    Args:
        more: arguments of `Trainer`, `ckpt_path`, and what the first lines take out of it.
    """
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
            self.automatic_optimization = optimizers < 2
            made = [torch.optim.SGD(self.net.parameters(), lr=0.05) for _ in range(optimizers)]
            return made if optimizers > 1 else made[0] if made else None

    warnings.simplefilter("ignore")
    optimizers, resume = more.pop("optimizers", 1), more.pop("ckpt_path", None)
    every, shown = more.pop("save_every", 0), more.pop("save_shown", False)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    if shown:  # as validation ends
        once = {"every_n_epochs": 1, "save_on_train_epoch_end": False}
        saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, **once)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    given = {"strategy": SyncStrategy(sync), "accelerator": "cpu", "devices": 2, **quiet}
    given |= {"max_steps": STEPS, "limit_val_batches": 0, "gradient_clip_val": 0.5}
    if every or shown:
        given["callbacks"] = [saves]
    trainer = Trainer(**{**given, "enable_checkpointing": "callbacks" in given, **more})
    torch.manual_seed(5)
    module = Module()
    loaders = [torch.utils.data.DataLoader(samples(n), batch_size=4) for n in (40, 8)]
    trainer.fit(module, *loaders, ckpt_path=resume)
    return module


NAMES = ("allreduce", "slowmo", "co2", "co2_keep", "streaming_diloco")


def both_ways(folder: str) -> dict[str, tuple[Weights, Weights]]:
    """Final weights under SyncStrategy, and of the same batches in a loop of one's own."""
    found = {}
    for name in (*NAMES, BLOCKING):
        module = fitted(method(name), folder)
        found[name] = held(module.net), by_hand(name, module.batches)
    return found


def by_hand(name: str, batches: list[Any]) -> Weights:
    """Final weights of a loop of one's own."""
    model, sync = net(), method(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mesh = co2.Mesh.world(device="cpu")
    wrapped = sync.prepare(model, optimizer, mesh, total_steps=STEPS)
    for batch in batches:
        loss(wrapped, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        sync.step()
        optimizer.zero_grad()
    with sync.consensus():
        final = held(model)
    sync.flush()
    return final


def test_it_is_ones_own_loop(tmp_path: Path) -> None:
    ways = called(both_ways, tmp_path, 2)
    for found in ways:
        for name in (*NAMES, BLOCKING):
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
    for found in called(interrupted, tmp_path, 2):
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
    for found in called(saved, tmp_path, 2):
        for left, state in found:
            torch.testing.assert_close(state, left, rtol=0, atol=0)


def resumed(folder: str) -> dict[str, list[tuple[Weights, Weights]]]:
    """Weights of trainings that go on, and of loops of one's own on the same batches: from a file
    that was written after `fit`, and from a link, beside whose own name lies what is not its own.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = {}
    for name in NAMES:
        place = Path(folder) / name
        link = ModelCheckpoint(place, "{step}", every_n_train_steps=5, save_last="link")
        more = {"enable_checkpointing": True, "max_steps": 5, "callbacks": [link]}
        begun = fitted(method(name), folder, **more)
        begun.trainer.save_checkpoint(place / "after.ckpt")
        other = place / "last.ckpt.sync" / f"sync_{begun.trainer.global_rank}.pt"
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"of another training")
        assert (place / "last.ckpt").is_symlink()
        found[name] = []
        for kind in ("after", "last"):
            again = fitted(method(name), folder, ckpt_path=place / f"{kind}.ckpt")
            final = by_hand(name, [*begun.batches, *again.batches])
            found[name].append((held(again.net), final))
    return found


def test_it_goes_on_from_files_written_after_fit_and_from_links(tmp_path: Path) -> None:
    for found in called(resumed, tmp_path, 2):
        for name, pairs in found.items():
            for resumed_, final in pairs:
                torch.testing.assert_close(resumed_, final, rtol=1e-5, atol=1e-7, msg=name)


def averaged(folder: str) -> dict[str, tuple[Weights, Weights, Weights, Weights]]:
    """With callbacks that average weights over steps: the final weights, this replica's averages,
    and the weights of checkpoints that were written in training and after it. The last step ends a
    round, so the weights lag behind."""
    from lightning.pytorch import callbacks

    found = {}
    for kind in ("swa", "ema"):
        ema = kind == "ema"
        own: Any = callbacks.EMAWeightAveraging(decay=0.5)
        if not ema:
            own = callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2)
        saves = callbacks.ModelCheckpoint(folder, kind, enable_version_counter=False)
        more = {"max_epochs": 4, "max_steps": -1, "callbacks": [own, saves]}
        sync = co2.CO2(co2.CO2.Config(tau=2))
        module = fitted(sync, folder, enable_checkpointing=True, **more)
        module.trainer.save_checkpoint(f"{folder}/{kind} after.ckpt")
        averages = own._average_model.module if ema else own._average_model
        paths = [f"{folder}/{name}.ckpt" for name in (kind, f"{kind} after")]
        states = [torch.load(path, weights_only=False)["state_dict"] for path in paths]
        trained = dict(averages.named_parameters())
        during, after = [{name: state[name] for name in trained} for state in states]
        final = {name: held(module)[name] for name in trained}
        found[kind] = final, held(averages), during, after
    return found


def test_what_callbacks_average_stays(tmp_path: Path) -> None:
    """After `fit` each replica has the mean of what the callbacks of all have averaged."""
    ways = called(averaged, tmp_path, 2)
    for kind, (final, _, during, after) in ways[0].items():
        for name in final:
            each = torch.stack([found[kind][1][name] for found in ways])
            close = {"rtol": 0, "atol": 1e-6, "msg": f"{kind} {name}"}
            torch.testing.assert_close(final[name], each.mean(0), **close)
            torch.testing.assert_close(after[name], final[name], **close)
            if kind == "ema":  # that of the last epoch's end; SWA averages only at the end
                torch.testing.assert_close(during[name], final[name], **close)
            for found in ways:
                torch.testing.assert_close(found[kind][0][name], final[name], rtol=0, atol=0)
            assert (each[0] - each[1]).abs().max() > 1e-4


def stored(folder: str) -> tuple[list[str], list[str], Weights, Weights]:
    """What a custom checkpoint IO was asked to write and to remove, and the weights of a training
    and of one that goes on in the memory of fsspec."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import TorchCheckpointIO

    written, removed = [], []

    class Told(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            written.append(str(path))
            super().save_checkpoint(checkpoint, path, storage_options)

        def remove_checkpoint(self, path: Any) -> None:
            removed.append(str(path))
            super().remove_checkpoint(path)

    def new() -> Any:
        saves = ModelCheckpoint("memory://bucket/x", "{step}", every_n_train_steps=10)
        return {"callbacks": [saves], "enable_checkpointing": True, "devices": 1}

    fitted(method("co2"), folder, plugins=[Told()], max_steps=20, **new())
    whole = fitted(method("co2"), folder, max_steps=25, **new())
    path = "memory://bucket/x/step=20.ckpt"
    again = fitted(method("co2"), folder, max_steps=25, ckpt_path=path, **new())
    return written, removed, held(whole.net), held(again.net)


def test_state_goes_where_the_checkpoint_goes(tmp_path: Path) -> None:
    found = called(stored, tmp_path, 1)
    written, removed, whole, again = found[0]
    old, new = (f"memory://bucket/x/step={step}.ckpt" for step in (10, 20))
    states = [f"{path}.sync/sync_0.pt" for path in (old, new)]
    assert written == [states[0], old, states[1], new]
    assert removed == [old, f"{old}.sync"]
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    assert not (tmp_path / "memory:").exists()


def fitted_again(folder: str) -> tuple[Weights, Weights, Weights]:
    """With what weights a second `fit` begins to train, after the first has ended with an error in
    validation. And what a training leaves, and the same where no step was left to train."""
    from lightning.pytorch.callbacks import LambdaCallback

    trainers, seen = [], []

    def fail(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5 and not trainers:
            trainers.append(trainer)
            raise ArithmeticError

    def see(_: Any, module: Any) -> None:
        seen.append(held(module.net))

    own = LambdaCallback(on_validation_epoch_start=fail, on_train_start=see)
    more = {"limit_val_batches": 1.0, "num_sanity_val_steps": 1, "val_check_interval": 5}
    with pytest.raises(ArithmeticError):
        fitted(method("co2"), folder, callbacks=[own], **more)
    (trainer,) = trainers
    module = trainer.lightning_module
    trainer.fit(module, trainer.train_dataloader, trainer.val_dataloaders)
    finished = fitted(method("co2"), folder, save_every=5, max_steps=5)
    again = fitted(method("co2"), folder, max_steps=5, ckpt_path=f"{folder}/step=5.ckpt")
    return seen[1], held(finished.net), held(again.net)


def test_fit_may_follow_an_error_and_an_end(tmp_path: Path) -> None:
    ways = called(fitted_again, tmp_path, 2)
    for begun, finished, again in ways:
        torch.testing.assert_close(begun, ways[0][0], rtol=0, atol=0)
        torch.testing.assert_close(again, finished, rtol=0, atol=0)


def refused(folder: str) -> list[str]:
    from lightning.pytorch.plugins import MixedPrecision

    from co2.integrations.lightning import SyncStrategy

    half = MixedPrecision("16-mixed", "cpu")
    lines = [
        refusal(lambda: fitted(method("co2"), folder, **more))  # noqa: B023
        for more in ({"optimizers": 2}, {"optimizers": 0}, {"plugins": [half]})
    ]
    fitted(method("co2"), folder, save_every=5)
    path, name = f"{folder}/step=5.ckpt", f"sync_{torch.distributed.get_rank()}.pt"
    own = Path(f"{path}.sync") / name
    whole, newer = own.read_bytes(), Path(f"{folder}/step=10.ckpt.sync") / name
    # The second: as when the file is written again, and the processes end halfway.
    for other, state in (("slowmo", whole), ("co2", newer.read_bytes()), ("co2", whole[:100])):
        own.write_bytes(state)
        sync = method(other)
        lines.append(refusal(lambda: fitted(sync, folder, ckpt_path=path)))  # noqa: B023
    return [*lines, refusal(lambda: SyncStrategy("co2"))]  # type: ignore[arg-type]


def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    for lines in called(refused, tmp_path, 2):
        words = ("configure_optimizers=2: ", "configure_optimizers=None: ", "precision=16-mixed: ")
        words += ("saved by co2", "is of step 10, the checkpoint of step 5", "cannot be read")
        words += ("sync=str: ",)
        assert all(word in line for word, line in zip(words, lines, strict=True)), lines
