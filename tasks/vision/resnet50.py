"""ResNet-50, and ResNet-18: image classification.

He et al., "Deep residual learning for image recognition" (2016). The implementation is timm's,
which has stride 2 in the 3×3 convolution. The weights are random at the start: convolutions as in
He et al. (2015, fan-out), the last batch norm of each block at zero and, for size=full, the
classifier from N(0, 0.01²), as in Goyal et al. (2017).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torch import nn

from co2.config import Optimizer
from co2.errors import require
from tasks.shared.optimizer import NO_MATRIX
from tasks.shared.randomness import seeded
from tasks.vision.classification import Classification


class Size(Enum):
    smoke = "smoke"
    full = "full"


DEPTHS = (18, 50)  # 11.7 M and 25.6 M parameters with 1000 classes

LAYERS, CHANNELS = (1, 1, 1, 1), (24, 48, 96, 192)
"""Of size=smoke: blocks of each stage, and their channels."""


class ResNet50(Classification):
    """The task `resnet50`."""

    @dataclass
    class Config(Classification.Config):
        size: Size = Size.smoke
        """smoke: four basic blocks of 24 to 192 channels, 0.7 M parameters. full: the published
        network of this depth."""
        depth: Literal[18, 50] = 50
        """Layers of size=full: 18 or 50. The smoke network stands for both."""

    name = "resnet50"

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`."""
        require(self.optim.name is not Optimizer.muon, "optim.name", "muon", NO_MATRIX)
        hint = "batch norm needs at least 2"
        require(self.train.batch_size >= 2, "train.batch_size", self.train.batch_size, hint)
        super().setup(num_workers)

    def architecture(self) -> tuple[str, dict[str, object]]:
        """See `Classification.architecture`."""
        if self.config.size is Size.full:
            return f"resnet{self.config.depth}", {}
        return "resnet18", {"layers": LAYERS, "channels": CHANNELS}

    def model(self) -> nn.Module:
        """See `Task.model`. With 1000 classes, 25.6 M parameters; 11.7 M with a depth of 18.
        Under `with torch.device("meta")` no memory is taken."""
        from timm import create_model  # takes seconds
        from timm.models.resnet import BasicBlock, ResNet

        with seeded(self.train.seed):
            if self.config.size is Size.full:
                full = create_model(f"resnet{self.config.depth}", num_classes=self.num_classes)
                classifier = full.get_submodule("fc")
                assert isinstance(classifier, nn.Linear)
                nn.init.normal_(classifier.weight, std=0.01)  # Goyal et al., section 5.1
                nn.init.zeros_(classifier.bias)
                return full
            return ResNet(
                BasicBlock,  # type: ignore[arg-type]  # timm takes the class
                layers=LAYERS,
                channels=CHANNELS,
                num_classes=self.num_classes,
            )
