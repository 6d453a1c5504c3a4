"""TransNormerLLM from scratch: next-token prediction on text.

The CO2 paper's large models; see tasks/transnormer_model.py.
"""

from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.optim import Optimizer

from tasks.causal import CausalText
from tasks.optimizer import make_optimizer
from tasks.randomness import seeded
from tasks.transnormer_model import TransNormer as Model

# A name that begins with a digit cannot be a class attribute.
Size = Enum("Size", {"smoke": "smoke", "385m": "385m", "1b": "1b", "7b": "7b"})

SHAPES = {
    Size["smoke"]: (4, 4, 128),  # 1.4 M parameters with a vocabulary of 4096
    Size["385m"]: (24, 8, 1024),  # 385 M, as all below with the 50257 tokens of GPT-2's tokenizer
    Size["1b"]: (16, 16, 2048),  # 992 M
    Size["7b"]: (30, 32, 4096),  # 6875 M
}
"""Layers, heads, width."""


class TransNormer(CausalText):
    """The task `transnormer`."""

    @dataclass
    class Config(CausalText.Config):
        size: Size = Size["smoke"]

    name = "transnormer"

    def model(self) -> nn.Module:
        """See `Task.model`. Any device: `with torch.device("meta")` counts parameters for free."""
        with seeded(self.train.seed):
            return Model(self.vocab_size, *SHAPES[self.config.size])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """See `Task.optimizer`. The angles of LRPE have no decay: 0 would mean no position."""
        angles = {name for name, _ in model.named_parameters() if name.endswith("theta")}
        return make_optimizer(model, self.optim, spared=angles)
