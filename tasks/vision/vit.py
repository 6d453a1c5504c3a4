"""Vision transformer: image classification.

Dosovitskiy et al., "An image is worth 16×16 words" (2021). The implementation is timm's, the
weights are random at the start, and training is as in DeiT (Touvron et al., 2021).
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

from torch import Tensor, nn
from torch.optim import Optimizer

from co2.errors import require
from co2.limits import Amount, Count, Decay, Range, Share
from co2.task import Pace
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import AUGMENTED_PER_S, PICTURES
from tasks.shared.randomness import generator, seeded
from tasks.vision.classification import Classification
from tasks.vision.images import Augment, erasing, mixing, rand_augment


class Size(Enum):
    smoke = "smoke"
    small = "small"
    base = "base"


SHAPES = {
    Size.smoke: (7, 3, 4, 96),  # 0.3 M parameters with images of 28×28
    Size.small: (16, 12, 6, 384),  # 22 M, as DeiT-S
    Size.base: (16, 12, 12, 768),  # 87 M, ViT-B/16
}
"""Side of a patch, layers, heads, width."""


class ViT(Classification):
    """The task `vit`."""

    @dataclass
    class Config(Classification.Config):
        size: Size = Size.smoke
        """small is DeiT-S, base is ViT-B/16; smoke is a small one for a laptop."""
        repeats: Count = 1
        """How often an epoch takes a sample, each time augmented anew; with N it takes a N-th of
        all samples, so its number of steps is the same (repeated augmentation)."""
        rand_augment: Annotated[int, Range(0, 10)] = 0
        """Mean magnitude of RandAugment's two operations, from 1 to 10; 0 for none."""
        random_erasing: Share = 0.0
        """Probability that noise replaces a rectangle of a training image."""
        mixup: Amount = 0.0
        """Parameter of mixup's Beta distribution; 0 for none."""
        cutmix: Amount = 0.0
        """Parameter of CutMix's Beta distribution; 0 for none. With both, each batch draws one."""
        drop_path: Decay = 0.0
        """Probability that a sample skips the last layer; it grows linearly from 0 at the first."""

        def __post_init__(self) -> None:
            super().__post_init__()
            patch = SHAPES[self.size][0]
            hint = f"must be a multiple of {patch}, the patches of size={self.size.name}"
            require(self.image_size % patch == 0, "image_size", self.image_size, hint)

    name = "vit"
    interpolation = "bicubic"

    @property
    def repeats(self) -> int:  # type: ignore[override]
        """See `Classification`."""
        return self.config.repeats

    def model(self) -> nn.Module:
        """See `Task.model`. On the device "meta" it takes no memory, to count parameters."""
        from timm.models.vision_transformer import VisionTransformer  # takes seconds

        patch, layers, heads, width = SHAPES[self.config.size]
        with seeded(self.train.seed):
            return VisionTransformer(
                img_size=self.config.image_size,
                patch_size=patch,
                embed_dim=width,
                depth=layers,
                num_heads=heads,
                num_classes=self.num_classes,
                drop_path_rate=self.config.drop_path,
            )

    def architecture(self) -> tuple[str, dict[str, object]]:
        """See `Classification.architecture`."""
        patch, layers, heads, width = SHAPES[self.config.size]
        shape = {"embed_dim": width, "depth": layers, "num_heads": heads}
        given = {"img_size": self.config.image_size, "patch_size": patch, **shape}
        return "vit_base_patch16_224", given

    def optimizer(self, model: nn.Module) -> Optimizer:
        """See `Task.optimizer`. As in timm and DeiT, the position embeddings and the class token
        have no weight decay."""
        spared = {"pos_embed", "cls_token"}
        return make_optimizer(model, self.optim, spared, ends={"head.weight"})

    @property
    def pace(self) -> Pace:
        """See `Planned`."""
        rate = super().pace.samples_per_s
        return replace(
            PICTURES, samples_per_s=rate and (AUGMENTED_PER_S if self.changes() else rate)
        )

    def changes(self) -> list[Augment]:
        """See `Classification.changes`."""
        magnitude, chance = self.config.rand_augment, self.config.random_erasing
        steps = rand_augment(magnitude, self.config.image_size) if magnitude else []
        steps += [erasing(chance)] if chance else []
        return steps

    def mixing(self, draw: int, worker: int) -> Tensor | None:
        """See `Classification.mixing`. All images of a micro-batch have the same weights."""
        mixup, cutmix = self.config.mixup, self.config.cutmix
        if not mixup and not cutmix:
            return None
        rng = generator(self.train.seed, draw, worker)
        return mixing(rng, self.config.image_size, mixup, cutmix)
