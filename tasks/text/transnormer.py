"""TransNormerLLM from scratch: next-token prediction on text.

These are the large models of the CO2 paper; see tasks/text/transnormer_model.py.
"""

from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.optim import Optimizer

from co2.task import Pace
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import LARGE_TEXT, TEXT
from tasks.shared.randomness import seeded
from tasks.text.causal import CausalText
from tasks.text.transnormer_model import TransNormer as Model

# A name that begins with a digit cannot be a class attribute.
Size = Enum("Size", {"tiny": "tiny", "smoke": "smoke", "385m": "385m", "1b": "1b", "7b": "7b"})

SHAPES = {
    Size["tiny"]: (3, 4, 64),  # 0.2 M parameters with a vocabulary of 512
    Size["smoke"]: (4, 4, 128),  # 1.4 M parameters with a vocabulary of 4096
    Size["385m"]: (24, 8, 1024),  # 385 M; this and all below with GPT-2's vocabulary
    Size["1b"]: (16, 16, 2048),  # 992 M
    Size["7b"]: (30, 32, 4096),  # 6875 M
}
"""Layers, heads, width."""


class TransNormer(CausalText):
    """The task `transnormer`."""

    @dataclass
    class Config(CausalText.Config):
        size: Size = Size["smoke"]
        """385m, 1b and 7b are TransNormerLLM's; tiny and smoke are small ones for a laptop."""

    name = "transnormer"

    def model(self) -> nn.Module:
        """See `Task.model`. On the device "meta" it takes no memory, to count parameters."""
        with seeded(self.train.seed):
            return Model(self.padded_vocab_size, *self.config.cut(SHAPES[self.config.size]))

    @property
    def pace(self) -> Pace:
        """See `Planned`."""
        return LARGE_TEXT if self.config.size is Size["7b"] else TEXT

    def optimizer(self, model: nn.Module) -> Optimizer:
        """See `Task.optimizer`. The angles of LRPE have no weight decay, because an angle of 0
        would encode no position."""
        angles = {name for name, _ in model.named_parameters() if name.endswith("theta")}
        return make_optimizer(model, self.optim, spared=angles)
