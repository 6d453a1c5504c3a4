"""Lightning's Trainer under CO2: a strategy.

python examples/lightning_trainer.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import co2
from co2.integrations.lightning import SyncStrategy


class Sums(LightningModule):
    """Learns to add eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def _loss(self, batch: list[Tensor]) -> Tensor:
        (x,) = batch
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: list[Tensor], _number: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], _number: int) -> None:
        self.log("loss", self._loss(batch), sync_dist=True)  # of the consensus

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    train, validation = (TensorDataset(torch.randn(size, 8)) for size in (6400, 512))
    trainer = Trainer(
        strategy=SyncStrategy(co2.CO2(tau=4)),
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        default_root_dir="results/runs/examples/lightning_trainer",
    )
    if trainer.is_global_zero:
        print(f"replicas: {trainer.world_size}")
    if trainer.world_size == 1:
        print("warning: there is nothing to synchronize; give Trainer more devices")
    trainer.fit(Sums(), DataLoader(train, 64, shuffle=True), DataLoader(validation, 64))
    if trainer.is_global_zero:
        print(f"last loss {trainer.callback_metrics['loss']:.3f}")
