"""Semantic segmentation of ADE20K with UperNet, and of generated scenes at scale=smoke."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.config import DataConfig, OptimConfig, TrainConfig, at_home
from co2.config import Optimizer as OptimizerName
from co2.errors import ConfigError, require
from co2.limits import Count, Decay, Limited, Positive, Range
from co2.program import python
from co2.task import Batch, Published
from tasks.ade20k import pairs, scenes
from tasks.ade20k.pairs import Pairs
from tasks.ade20k.scenes import Scenes
from tasks.ade20k.segmentation import (
    IGNORED,
    confusion,
    cross_entropy,
    enlarged,
    scores,
    whole,
)
from tasks.ade20k.upernet import check_backbone, upernet
from tasks.ade20k.views import Views
from tasks.shared.evaluation import evaluating, share, tally
from tasks.shared.loader import load
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import CONVOLUTIONS
from tasks.shared.randomness import seeded, uniforms
from tasks.shared.sampling import Sampler, Stretches, evaluated, validation_samples

if TYPE_CHECKING:
    from co2.comm.mesh import Mesh

PUBLISHED = Published(20_210, 1_800_000_000)
AUXILIARY = 0.4
"""Weight of the auxiliary head's loss, as in mmsegmentation and transformers."""


Side = Annotated[int, Range(32, unit="pixels")]
"""Not less than the stride of the backbone."""


class Source(Enum):
    scenes = "scenes"
    ade20k = "ade20k"


class ADE20K:
    """The task `ade20k`. A sample is an image with a class for each pixel.

    Validation images are evaluated whole and one by one, resized to `short_side` pixels at the
    shorter side. The logits are resized to the labels, which keep their size on disk.
    """

    @dataclass
    class Config(Limited):
        source: Source = Source.scenes
        """scenes: generated. ade20k: `data.root`/ADEChallengeData2016, see tasks.prepare.
        Where data.path=FOLDER (laid out like ADE20K) is given, it replaces either."""
        backbone: str = "tiny"
        """tiny, or the name of a model of timm whose feature maps have four sizes."""
        weights: str | None = None
        """File with a state dict of timm for the backbone, .pth or .safetensors; null: random."""
        hidden: Count = 32
        """Channels of UperNet's head; the auxiliary head has half as many."""
        dropout: Decay = 0.0
        """Probability that a channel is dropped before the classes of either head."""
        crop: Side = 32
        """Side of the square training views, in pixels."""
        short_side: Side = 32
        """Shorter side of a training image at scale 1 and of a validation image, in pixels."""
        scales: tuple[Positive, Positive] = (0.5, 2.0)
        """Smallest and largest scale of a training image."""
        eval_samples: Count | None = None
        """Number of validation images in one evaluation, spread evenly; null takes all."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.weights = at_home(self.weights)
            low, high = self.scales
            hint = "must be two numbers above 0, the smaller first"
            require(low <= high, "scales", list(self.scales), hint)

    version = 2  # batches are cropped and coloured as one
    pace = CONVOLUTIONS
    unit = "samples"
    units_per_sample = 1

    def __init__(
        self, config: Config, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        self.config, self.train, self.optim, self.data = config, train, optim, data
        own = data.path is None and config.source is Source.scenes
        self.num_classes = len(scenes.CLASSES) if own else pairs.CLASSES
        self._opened: dict[str, Scenes | Pairs] = {}
        self._validation: list[int] = []  # the images that an evaluation takes
        self._frequencies: Tensor | None = None

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`. Nothing is written. Files are listed here, and read when needed."""
        hint = "batch norm, over pooled maps of one pixel, needs at least 2"
        require(self.train.batch_size >= 2, "train.batch_size", self.train.batch_size, hint)
        try:
            check_backbone(self.config.backbone, self.config.weights)
        except ConfigError as error:
            raise error.under("ade20k") from None
        if self.optim.name is OptimizerName.muon:
            with torch.device("meta"):
                self.optimizer(self.model())  # refuses a backbone of convolutions only
        self._opened = {split: self._open(split) for split in pairs.SPLITS}
        self._sampler(num_workers)
        available, part = len(self._samples("validation")), self.data.validation
        self._validation = validation_samples(available, self.config.eval_samples, part).tolist()

    def model(self) -> nn.Module:
        """See `Task.model`. On the device "meta" the file of weights is not read."""
        config = self.config
        with seeded(self.train.seed):
            return upernet(
                config.backbone, config.weights, config.hidden, self.num_classes, config.dropout
            )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return make_optimizer(model, self.optim)

    def batches(self, mesh: "Mesh", start: int) -> Iterator[Batch]:
        """See `Task.batches`. A view is a pure function of (seed, epoch, sample).

        A batch holds views, fp32 [batch_size, 3, crop, crop], and labels, uint8 [batch_size, crop,
        crop].
        """
        sampler = self._sampler(mesh.num_workers, mesh.stretches)
        config, samples = self.config, self._samples("training")
        views = Views(config.crop, config.short_side, config.scales)

        def make(draw: int) -> tuple[Tensor, Tensor]:
            chosen = sampler.indices(draw, mesh.worker)
            draws = uniforms(views.draws, self.train.seed, sampler.epoch(draw), chosen)
            if isinstance(samples, Scenes):
                return views(samples.take(chosen), draws)
            return views([samples[sample] for sample in chosen.tolist()], draws)

        return load(make, count(start), self.data.workers, mesh.device)

    def blank(self) -> Batch:
        """See `Planned`."""
        rows, crop = self.train.batch_size, self.config.crop
        return torch.zeros(rows, 3, crop, crop), torch.zeros(rows, crop, crop, dtype=torch.uint8)

    def published(self) -> Published | None:
        """See `Planned`."""
        public = self.data.path is None and self.config.source is Source.ade20k
        return PUBLISHED if public else None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy over the labelled pixels in nats, fp32. In training mode the
        auxiliary head's loss is added, times `AUXILIARY`."""
        assert isinstance(batch, tuple)
        images, labels = batch
        found = model(images)
        heads = found if isinstance(found, tuple) else (found,)
        labelled = (labels != IGNORED).sum().clamp(min=1)
        losses = [
            cross_entropy(enlarged(logits, labels.shape[1:]), labels).sum() / labelled
            for logits in heads
        ]
        return losses[0] + AUXILIARY * losses[1] if len(losses) == 2 else losses[0]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task.evaluate`. Unlabelled pixels are left out of every metric.

        Returns:
            "loss": mean cross-entropy over the pixels of all images, in nats;
            "miou": mean intersection over union of the classes that occur, from 0 to 1;
            "pixel_accuracy": share of the pixels whose class is right, from 0 to 1.
            All three are computed over the pixels of all images together.
        """
        samples, chosen = self._samples("validation"), self._validation
        device = next(model.parameters()).device

        def make(number: int) -> tuple[Tensor, ...]:
            image, labels = samples[chosen[number]]
            return whole(image, self.config.short_side), labels

        loaded = load(make, share(len(chosen)), self.data.workers, device)

        def compute(number: int) -> tuple[Tensor, Tensor]:
            image, labels = (part[None].to(device) for part in next(loaded))
            logits = enlarged(model(image), labels.shape[1:])
            losses = cross_entropy(logits, labels)
            found = confusion(logits.argmax(dim=1), labels, self.num_classes)
            return losses.double().sum().reshape(1), found

        # Images differ in size; to compile for every size would cost more than it saves.
        with evaluating(model), torch.compiler.set_stance("force_eager"):
            (loss,), counts = tally(compute, len(chosen))
        self._frequencies = counts.sum(dim=1).cpu()
        return {"loss": loss / max(1, int(counts.sum())), **scores(counts)}

    def baselines(self) -> dict[str, float]:
        """See `Task.baselines`. "majority_miou" and "majority_pixel_accuracy" are the scores of a
        model that always predicts the most frequent class of the pixels that are evaluated. All
        their labels are read, unless an evaluation has counted them."""
        if self._frequencies is None:
            samples = self._samples("validation")
            found = (samples.labels(n).flatten() for n in self._validation)
            counts = sum(torch.bincount(labels, minlength=IGNORED + 1) for labels in found)
            assert isinstance(counts, Tensor)
            self._frequencies = counts[: self.num_classes]
        table = torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)
        table[:, self._frequencies.argmax()] = self._frequencies
        return {f"majority_{name}": score for name, score in scores(table).items()}

    def fingerprint(self) -> dict[str, object]:
        """See `Task.fingerprint`."""
        digests = [samples.digest() for samples in self._opened.values()]
        own = self.data.path is None
        return {
            "data": self.config.source.name if own else self.data.path,
            # For scenes, of pixels and labels; for files, of their names and sizes.
            "sha256": hashlib.sha256("".join(digests).encode()).hexdigest(),
            "num_samples": {split: len(samples) for split, samples in self._opened.items()},
            "evaluated": evaluated(self.data.validation, self._validation),
        }

    def _open(self, split: str) -> Scenes | Pairs:
        if self.data.path is not None:
            hint = f"must hold images/ and annotations/ as {pairs.FOLDER} does"
            return Pairs(Path(self.data.path), split, "data.path", self.data.path, hint)
        if self.config.source is Source.scenes:
            return Scenes(split)
        root = self.data.root
        hint = f"prepare it with: {python()} -m tasks.prepare ade20k --root {root}"
        return Pairs(Path(root) / pairs.FOLDER, split, "data.root", root, hint)

    def _samples(self, split: str) -> Scenes | Pairs:
        assert self._opened, "call setup() first"
        return self._opened[split]

    def _sampler(self, num_workers: int, stretches: Stretches = ()) -> Sampler:
        samples = len(self._samples("training"))
        return Sampler.of(self.train, samples, num_workers, stretches)
