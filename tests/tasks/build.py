"""Tasks as train.py builds them, from a few keys."""

from pathlib import Path
from typing import Any

import torch

from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, TrainConfig
from tasks import GPT2, MoE, Toy, TransNormer


def gpt2(
    root: Path, path: Path | None = None, seed: int = 0, batch_size: int = 4, **config: Any
) -> GPT2:
    data = DataConfig(root=str(root), path=None if path is None else str(path))
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return GPT2(GPT2.Config(**config), train, OptimConfig(lr=3e-3), data)


def transnormer(
    root: Path, path: Path | None = None, seed: int = 0, batch_size: int = 4, **config: Any
) -> TransNormer:
    data = DataConfig(root=str(root), path=None if path is None else str(path))
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return TransNormer(TransNormer.Config(**config), train, OptimConfig(lr=3e-3), data)


def moe(
    root: Path, path: Path | None = None, seed: int = 0, batch_size: int = 4, **config: Any
) -> MoE:
    data = DataConfig(root=str(root), path=None if path is None else str(path))
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return MoE(MoE.Config(**config), train, OptimConfig(lr=3e-3), data)


def toy(seed: int = 0, batch_size: int = 8, path: str | None = None, **config: Any) -> Toy:
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return Toy(Toy.Config(**config), train, OptimConfig(lr=1e-2), DataConfig(path=path))


def mesh(replica: int = 0, num_replicas: int = 1) -> Mesh:
    return Mesh(replica, num_replicas, torch.device("cpu"))
