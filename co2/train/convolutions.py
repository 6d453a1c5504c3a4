"""Convolutions on a GPU: the layout of their weights, and the choice of cuDNN's algorithms."""

import torch
from torch import nn

from co2.config import Strategy
from co2.train.replica import CUT


def tune_convolutions(module: nn.Module, device: torch.device, strategy: Strategy) -> None:
    """On a GPU, lay out four-dimensional weights channels last, as tensor cores read them, and let
    cuDNN try its algorithms for every new shape. Activations follow the weights' layout.

    fully_shard takes contiguous weights only, so under its strategies the layout stays.
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = True
    if strategy not in CUT:
        module.to(memory_format=torch.channels_last)
