"""Augmentation and metrics of segmentation, against plain computations."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tasks.ade20k import segmentation
from tasks.ade20k.segmentation import (
    IGNORED,
    augmentation,
    confusion,
    cross_entropy,
    enlarged,
    normalized,
    scores,
    whole,
)
from tasks.shared.randomness import seeded

CLASSES = 6


def labelled(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels; class 4 occurs in predictions only, class 5 nowhere."""
    source = torch.Generator().manual_seed(seed)
    predicted = torch.randint(0, 5, shape, generator=source)
    labels = torch.randint(0, 4, shape, generator=source).to(torch.uint8)
    labels[torch.rand(shape, generator=source) < 0.3] = IGNORED
    labels[predicted == 3] = 3
    return predicted, labels


def test_scores_are_those_of_sets_of_pixels() -> None:
    predicted, labels = labelled(3, 17, 23)
    pixels = [pixel for pixel in np.ndindex(*labels.shape) if labels[pixel] != IGNORED]
    ious = []
    for kind in range(CLASSES):
        truth = {pixel for pixel in pixels if labels[pixel] == kind}
        found = {pixel for pixel in pixels if predicted[pixel] == kind}
        if truth | found:
            ious.append(len(truth & found) / len(truth | found))
    right = sum(int(labels[pixel]) == int(predicted[pixel]) for pixel in pixels)
    result = scores(confusion(predicted, labels, CLASSES))
    assert len(ious) == 5
    assert result == pytest.approx(
        {"miou": sum(ious) / 5, "pixel_accuracy": right / len(pixels)}, rel=1e-12
    )


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import confusion_matrix, jaccard_score

    predicted, labels = labelled(4, 31, 7, seed=1)
    kept = labels != IGNORED
    given = (labels[kept].numpy(), predicted[kept].numpy())
    counts = confusion(predicted, labels, CLASSES)
    assert (counts.numpy() == confusion_matrix(*given, labels=range(CLASSES))).all()
    assert scores(counts)["miou"] == pytest.approx(jaccard_score(*given, average="macro"))


def test_pixels_without_labels_count_nowhere() -> None:
    predicted, labels = labelled(2, 20, 20)
    before = confusion(predicted, labels, CLASSES)
    predicted[labels == IGNORED] = 5
    assert torch.equal(confusion(predicted, labels, CLASSES), before)
    logits = torch.randn(2, CLASSES, 20, 20)
    losses = cross_entropy(logits, labels)
    logits[:, :, :, :] = torch.where((labels == IGNORED)[:, None], torch.nan, logits)
    assert torch.equal(cross_entropy(logits, labels)[labels != IGNORED], losses[labels != IGNORED])
    assert (losses[labels == IGNORED] == 0).all() and (losses[labels != IGNORED] > 0).all()


def test_losses_and_logits_are_fp32_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = enlarged(torch.randn(1, 3, 4, 4, dtype=torch.bfloat16), (9, 7))
        losses = cross_entropy(logits, torch.zeros(1, 9, 7, dtype=torch.uint8))
    assert logits.shape == (1, 3, 9, 7) and losses.shape == (1, 9, 7)
    assert logits.dtype == losses.dtype == torch.float32


def sample(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The image tells its own label: red is 10 times the class, in blocks of 8 pixels."""
    source = np.random.default_rng(height)
    blocks = source.integers(0, 20, (height // 8 + 1, width // 8 + 1), np.uint8)
    labels = torch.from_numpy(blocks.repeat(8, 0).repeat(8, 1)[:height, :width])
    image = torch.stack([labels * 10, torch.full_like(labels, 7), torch.full_like(labels, 9)])
    return image, labels


def red(image: torch.Tensor) -> torch.Tensor:
    return image[0] * 58.395 + 123.675


def view(
    number: int,
    image: torch.Tensor,
    labels: torch.Tensor,
    crop: int,
    short_side: int,
    scales: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One view, of a key."""
    with seeded(number):
        return augmentation(crop, short_side, scales)(image, labels)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0)])
def test_image_and_labels_stay_together(
    monkeypatch: pytest.MonkeyPatch, scales: tuple[float, float]
) -> None:
    monkeypatch.setattr("tasks.ade20k.segmentation._COLOURS", ())
    seen = 0
    for number in range(20):
        found, labels = view(number, *sample(64, 80), 48, 64, scales)
        assert found.shape == (3, 48, 48) and found.dtype == torch.float32
        assert labels.shape == (48, 48) and labels.dtype == torch.uint8
        inside = F.max_pool2d(labels[None].float(), 5, 1, 2) == labels
        inside &= -F.max_pool2d(-labels[None].float(), 5, 1, 2) == labels
        inside &= labels != IGNORED
        inside[0, [0, 1, -2, -1]] = False  # resizing mixes at borders, of the view too
        inside[0, :, [0, 1, -2, -1]] = False
        seen += int(inside.sum())
        difference = red(found) - labels.float() * 10
        assert (difference[inside[0]].abs() < 6).all()
    assert seen > 2000


def test_what_the_image_does_not_fill_has_no_label() -> None:
    found, labels = view(0, *sample(40, 80), 64, 40, (1.0, 1.0))
    assert (labels[40:] == IGNORED).all() and (found[:, 40:] == 0).all()
    assert (labels[:40] != IGNORED).all()


def test_views_vary_and_depend_on_the_key_alone() -> None:
    image, labels = sample(64, 80)
    views = [view(number, image, labels, 48, 64, (0.5, 2.0)) for number in range(10)]
    assert all(not torch.equal(a, b) for n, (a, _) in enumerate(views) for b, _ in views[:n])
    torch.rand(1)
    for number in (3, 7):
        again = view(number, image, labels, 48, 64, (0.5, 2.0))
        assert all(torch.equal(a, b) for a, b in zip(again, views[number], strict=True))
    assert all(type(part) is torch.Tensor for part in views[0])
    assert torch.equal(image, sample(64, 80)[0]) and torch.equal(labels, sample(64, 80)[1])


def pixels(left: list[int], right: list[int]) -> torch.Tensor:
    """An image of two halves."""
    halves = torch.tensor([left] * 16 + [right] * 16, dtype=torch.uint8)
    return halves.T[:, None].expand(3, 32, 32).contiguous()


@pytest.mark.parametrize(
    ("number", "image", "measure", "low", "high"),
    [
        (0, pixels([160] * 3, [160] * 3), lambda rgb: rgb[0] / 160, 0.875, 1.125),
        (1, pixels([50] * 3, [150] * 3), lambda rgb: (rgb[0] - 100).abs() / 50, 0.5, 1.5),
        (2, pixels([120, 80, 40], [120, 80, 40]), lambda rgb: (rgb[0] - rgb[2]) / 80, 0.5, 1.5),
        # Of a red that turns, green or blue rises by six times the share of the circle.
        (
            3,
            pixels([200, 50, 50], [200, 50, 50]),
            lambda rgb: 1 + (rgb[1] - rgb[2]) / 900,
            0.9,
            1.1,
        ),
    ],
)
def test_each_change_of_colour_has_its_range(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    image: torch.Tensor,
    measure: Callable[[torch.Tensor], torch.Tensor],
    low: float,
    high: float,
) -> None:
    """Half of the views have it, and its factors are uniform."""
    colours = segmentation._COLOURS[number : number + 1]
    monkeypatch.setattr("tasks.ade20k.segmentation._COLOURS", colours)
    labels = torch.zeros(32, 32, dtype=torch.uint8)
    mean, deviation = (torch.tensor(rgb) for rgb in (segmentation._MEAN, segmentation._STD))
    change, factors = augmentation(32, 32, (1.0, 1.0)), []
    for n in range(400):
        with seeded(n):
            seen, _ = change(image, labels)
        factors.append(float(measure((seen[:, 5, 5] * deviation + mean).round())))
    off = [factor for factor in factors if factor != 1]
    error = 0.03 * (high - low)  # of whole levels
    assert 160 < len(off) < 240  # half, within four standard deviations
    assert low - error < min(off) < low + 3 * error and high - 3 * error < max(off) < high + error
    assert np.mean(off) == pytest.approx(
        (low + high) / 2, abs=4 * (high - low) / 12**0.5 / 160**0.5
    )


def test_both_halves_of_the_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flip in about half of the views, and every scale between the two."""
    monkeypatch.setattr("tasks.ade20k.segmentation._COLOURS", ())
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    labels = torch.arange(32, dtype=torch.uint8).expand(32, 32)  # by column
    flips, filled = [], []
    for number in range(200):
        _, seen = view(number, image, labels, 64, 32, (0.5, 2.0))
        known = seen[0][seen[0] != IGNORED].int()
        flips.append(bool(known[0] > known[-1]))
        filled.append(len(known))
    assert 70 < sum(flips) < 130
    assert 16 <= min(filled) < 20 and 60 < max(filled) <= 64 and len(set(filled)) > 30


def test_no_class_fills_a_crop_where_that_can_be() -> None:
    labels = torch.zeros(64, 256, dtype=torch.uint8)
    labels[:, 96:] = torch.arange(160, dtype=torch.uint8).clamp(max=99) % 5 + 1
    image = labels.expand(3, -1, -1).contiguous()
    shares = []
    for number in range(60):
        _, seen = view(number, image, labels, 64, 64, (1.0, 1.0))
        shares.append((seen == 0).float().mean().item())
    assert max(shares) < 0.75 and max(shares) > 0.3
    bare = torch.zeros(64, 64, dtype=torch.uint8)
    # Ten tries, then as it is.
    assert (view(0, image[:, :, :64], bare, 48, 64, (1.0, 1.0))[1] == 0).all()


def test_whole_images_keep_their_shape() -> None:
    image, _ = sample(64, 96)
    assert whole(image, 32).shape == (3, 32, 48)
    assert torch.equal(whole(image, 64), normalized(image))
    assert whole(sample(20, 400)[0], 32).shape == (3, 6, 128)  # the long side is at most 4 × 32
    mean = torch.tensor([123.675, 116.28, 103.53])[:, None, None]
    deviation = torch.tensor([58.395, 57.12, 57.375])[:, None, None]
    assert torch.allclose(normalized(mean.expand(3, 2, 2)), torch.zeros(3, 2, 2))
    assert torch.allclose(normalized((mean + deviation).expand(3, 2, 2)), torch.ones(3, 2, 2))
