"""Image classification, which resnet50 and vit share."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import ConfigError, require
from co2.limits import Count, Decay, Limited, PartShare
from co2.program import python
from co2.task import Batch, Pace, Package, Published
from tasks.shared.evaluation import evaluating, share, total
from tasks.shared.loader import load
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import CONVOLUTIONS, PICTURES_PER_S
from tasks.shared.randomness import seeded, uniforms
from tasks.shared.sampling import Sampler, Stretches, evaluated, validation_samples
from tasks.vision.crops import RandomCrop, central_crop
from tasks.vision.held import mnist
from tasks.vision.image_folder import ImageFolder, shown
from tasks.vision.images import MEAN, STD, Augment, Images, normalized
from tasks.vision.packed import FASHION_MNIST, is_packed, packed

if TYPE_CHECKING:
    from co2.comm.mesh import Mesh

MNIST_CLASSES, IMAGENET_CLASSES = 10, 1000
IMAGENET = Published(1_281_167, 150_000_000_000)

_EVAL_BATCH = 100
"""Images of one evaluation batch; ImageNet's validation part makes 500 batches."""


class DatasetName(Enum):
    mnist = "mnist"
    imagenet = "imagenet"


class Classification:
    """Base class of tasks whose samples are images with a label. A subclass adds the model.

    Images stay uint8 until they are on the model's device, because fp32 has four times the bytes
    to copy.
    """

    @dataclass
    class Config(Limited):
        dataset: DatasetName = DatasetName.mnist
        """mnist: 5000 digits of it. imagenet: ImageNet-1K in data.root, see tasks.prepare.
        Where data.path=FOLDER, with train/<class>/ and val/<class>/ or with train/<class>.npy
        and val/<class>.npy, is given, it replaces either."""
        image_size: Count = 28
        """Side of the square images that the model reads, in pixels."""
        eval_resize: Count = 28
        """Length of the shorter side in evaluation, before the centre is cropped, in pixels."""
        crop: PartShare = 0.08
        """Smallest share of an image that a training crop covers; with 1 it covers (nearly) all."""
        flip: bool = True
        """Whether half of the training crops are mirrored, left to right."""
        label_smoothing: Decay = 0.0
        """Share of the target that is spread evenly over all classes."""
        eval_samples: Count | None = None
        """Number of validation images in one evaluation, spread evenly; null takes all."""

        def __post_init__(self) -> None:
            super().__post_init__()
            hint = f"must be at least image_size, which is {self.image_size}"
            require(self.eval_resize >= self.image_size, "eval_resize", self.eval_resize, hint)

    name: str
    """Name of the task and of its node in the configuration."""
    interpolation = "bilinear"
    """Interpolation of the crops in training and evaluation."""
    version = 2  # batches are cropped and coloured as one
    unit = "samples"
    units_per_sample = 1
    repeats = 1
    """How often a sample is taken in an epoch, if at all: see `Sampler`."""

    # `Any`, because each subclass has a Config of its own.
    def __init__(
        self, config: Any, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        self.config, self.train, self.optim, self.data = config, train, optim, data
        self._opened: Images | None = None
        self._validation = np.empty(0, np.int64)  # the images that an evaluation takes

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`. A folder is listed, in seconds for ImageNet, but no image is read."""
        self._opened = self._open()
        self._sampler(num_workers)
        available, part = int(self._opened.counts["val"].sum()), self.data.validation
        # Images are sorted by class, so that each half has half of every class.
        self._validation = validation_samples(
            available, self.config.eval_samples, part, alternate=True
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return make_optimizer(model, self.optim)

    def batches(self, mesh: "Mesh", start: int) -> Iterator[Batch]:
        """See `Task.batches`.

        A batch holds images, uint8 [batch_size, 3, image_size, image_size], and labels, int64
        [batch_size]. Where images are mixed, it also holds the weight of each pixel: see `mixing`.
        """
        sampler, images = self._sampler(mesh.num_workers, mesh.stretches), self._images
        config, seed, worker = self.config, self.train.seed, mesh.worker
        crop = RandomCrop(config.image_size, config.crop, config.flip, self.interpolation)
        changes = self.changes()

        def changed(picture: Tensor, number: int, sample: int) -> Tensor:
            with seeded(seed, number, sample):
                for change in changes:
                    picture = change(picture)
            return picture

        def make(draw: int) -> tuple[Tensor, ...]:
            samples, views = sampler.indices(draw, worker), sampler.views(draw, worker)
            pictures, labels = images.take("train", samples.tolist())
            crops = crop(pictures, uniforms(crop.draws, seed, views, samples))
            crops = crops.expand(-1, 3, -1, -1).contiguous()  # grey ones have one channel
            if changes:
                keys = zip(crops, views.tolist(), samples.tolist(), strict=True)
                crops = torch.stack([changed(*key) for key in keys])
            keep = self.mixing(draw, worker)
            return (crops, labels) if keep is None else (crops, labels, keep)

        return load(make, count(start), self.data.workers, mesh.device)

    def changes(self) -> list[Augment]:
        """Return what is done to each training image after its crop, in this order."""
        return []

    def mixing(self, draw: int, worker: int) -> Tensor | None:
        """Return the weight of each pixel when images are mixed, fp32 [image_size, image_size] (see
        `tasks.vision.images.mixing`); None where they are not mixed.

        Args:
            draw: index of the micro-batch.
            worker: the worker that draws it.
        """
        return None

    def blank(self) -> Batch:
        """See `Planned`."""
        size, rows = self.config.image_size, self.train.batch_size
        images = torch.zeros(rows, 3, size, size, dtype=torch.uint8)
        batch = images, torch.zeros(rows, dtype=torch.int64)
        return batch if self.mixing(0, 0) is None else (*batch, torch.zeros(size, size))

    @property
    def pace(self) -> Pace:
        """See `Planned`."""
        rate = None if self.published() is None else PICTURES_PER_S
        return replace(CONVOLUTIONS, samples_per_s=rate)

    def published(self) -> Published | None:
        """See `Planned`."""
        public = self.data.path is None and self.config.dataset is DatasetName.imagenet
        return IMAGENET if public else None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats with label smoothing, computed in fp32 even under autocast.

        Each image of a mixed batch is mixed with the one before it, and the first with the last;
        the loss mixes their labels in the same shares.
        """
        assert isinstance(batch, tuple)
        images, labels, *mixed = batch
        inputs = normalized(images)
        if mixed:
            keep = mixed[0]
            inputs = inputs * keep + inputs.roll(1, 0) * (1 - keep)
        logits = model(inputs)
        with torch.autocast(logits.device.type, enabled=False):
            logits, smooth = logits.float(), self.config.label_smoothing
            loss = F.cross_entropy(logits, labels, label_smoothing=smooth)
            if mixed:
                other = F.cross_entropy(logits, labels.roll(1), label_smoothing=smooth)
                loss = torch.lerp(other, loss, keep.mean())
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task.evaluate`.

        Returns:
            "loss": mean cross-entropy in nats, without label smoothing;
            "top1", "top5": top-1 and top-5 accuracy, from 0 to 1.
        """
        device, images = next(model.parameters()).device, self._images
        chosen = self._validation
        num_batches = -(-len(chosen) // _EVAL_BATCH)
        crop = central_crop(self.config.image_size, self.config.eval_resize, self.interpolation)

        def make(batch: int) -> tuple[Tensor, Tensor]:
            rows = chosen[batch * _EVAL_BATCH : (batch + 1) * _EVAL_BATCH].tolist()
            seen, labels = images.take("val", rows)
            crops = crop(seen) if isinstance(seen, Tensor) else torch.stack([*map(crop, seen)])
            return crops.expand(-1, 3, -1, -1), labels

        made = load(make, share(num_batches), self.data.workers, device)

        def compute(batch: int) -> Tensor:
            inputs, labels = (part.to(device, non_blocking=True) for part in next(made))
            logits = model(normalized(inputs)).float()
            losses = F.cross_entropy(logits, labels, reduction="none")
            first = logits.topk(min(5, logits.shape[1])).indices
            right = first == labels[:, None]
            sums = [losses.double().sum(), right[:, 0].double().sum(), right.double().sum()]
            return torch.stack(sums)

        with evaluating(model):
            loss, top1, top5 = total(compute, num_batches)
        whole = len(chosen)
        return {"loss": loss / whole, "top1": top1 / whole, "top5": top5 / whole}

    def architecture(self) -> tuple[str, dict[str, object]]:
        """The name by which timm makes this model, and what else it is given."""
        raise NotImplementedError

    def package(self, model: nn.Module) -> Package:
        """See `Portable`: what timm reads, and transformers' TimmWrapper."""
        from timm.data import ImageNetInfo  # takes seconds

        name, given = self.architecture()
        names = [shown(found) for found in self._images.classes]
        # Both libraries have descriptions of ImageNet's classes, in place of such names.
        labels = {} if names == ImageNetInfo().label_names() else {"label_names": names}
        size = self.config.image_size
        about = {
            "architecture": name,
            "num_classes": self.num_classes,
            **labels,
            "model_args": given,
            "pretrained_cfg": {
                "input_size": [3, size, size],
                "crop_pct": size / self.config.eval_resize,
                "interpolation": self.interpolation,
                "mean": MEAN,
                "std": STD,
            },
        }
        words = [f"num_classes={self.num_classes}", *(f"{k}={v!r}" for k, v in given.items())]
        usage = f"""import timm

model = timm.create_model(
    "{name}",
    {", ".join(words)},
    checkpoint_path="FOLDER/model.safetensors",
)"""
        note = "It reads RGB from 0 to 1, less ImageNet's mean, over its deviation."
        return Package({"config.json": json.dumps(about, indent=2) + "\n"}, usage, note=note)

    def adopted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Portable`."""
        return dict(weights)

    def refusal(
        self, model: nn.Module, config: Mapping[str, Any], tokenizer: str | None
    ) -> str | None:
        """See `Portable`: timm's names and shapes tell all."""
        return None

    def baselines(self) -> dict[str, float]:
        """See `Task.baselines`. "majority_top1" is the top-1 accuracy of a model that always
        predicts the most frequent class."""
        counts = self._images.counts["val"]
        return {"majority_top1": counts.max().item() / counts.sum().item()}

    def fingerprint(self) -> dict[str, object]:
        """See `Task.fingerprint`."""
        images = self._images
        counts = {part: int(own.sum()) for part, own in images.counts.items()}
        return {
            **images.facts(),
            "num_samples": counts,
            "num_classes": images.num_classes,
            "evaluated": evaluated(self.data.validation, self._validation),
        }

    @property
    def num_classes(self) -> int:
        """Number of classes. It is known before `setup` except for a folder of the user's."""
        if self._opened is None and self.data.path is None:
            own = self.config.dataset is DatasetName.imagenet
            return IMAGENET_CLASSES if own else MNIST_CLASSES
        return self._images.num_classes

    @property
    def _images(self) -> Images:
        assert self._opened is not None, "call setup() first"
        return self._opened

    def _open(self) -> Images:
        if self.data.path is not None:
            path, place = self.data.path, Path(self.data.path)
            command = f"{python()} -m tasks.prepare {FASHION_MNIST} --root {place.parent}"
            known = place.exists() or place.name != FASHION_MNIST
            require(known, "data.path", path, f"no such folder; {command} makes it")
            kind = packed if is_packed(place) else ImageFolder
            return kind(place, "data.path", path)
        if self.config.dataset is DatasetName.mnist:
            return mnist()
        folder, key = Path(self.data.root) / "imagenet", f"{self.name}.dataset"
        command = f"{python()} -m tasks.prepare imagenet --root {self.data.root}"
        hint = f"{folder} does not exist; {command} --archives FOLDER makes it from the archives"
        require(folder.is_dir(), key, "imagenet", hint)
        tree = ImageFolder(folder, key, "imagenet")
        if tree.num_classes != IMAGENET_CLASSES:
            hint = f"{folder} holds {tree.num_classes} classes instead of {IMAGENET_CLASSES}"
            look = f"{python()} -m tasks.prepare imagenet --check {folder} tells which are missing"
            raise ConfigError(key, "imagenet", f"{hint}; {look}")
        return tree

    def _sampler(self, num_workers: int, stretches: Stretches = ()) -> Sampler:
        samples = int(self._images.counts["train"].sum())
        return Sampler.of(self.train, samples, num_workers, stretches, self.repeats)
