"""Augmentation and metrics of segmentation, against plain computations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tasks.ade20k.segmentation import (
    IGNORED,
    VIEW_DRAWS,
    augmented,
    confusion,
    cross_entropy,
    enlarged,
    normalized,
    scores,
    whole,
)
from tasks.shared.randomness import Draws, seeded, seeds

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
    draws = Draws(seeds(0, np.array([number])), VIEW_DRAWS)
    images, masks = augmented([(image, labels)], draws, crop, short_side, scales)
    return images[0], masks[0]


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
    """Not on the neighbours in a batch."""
    given = [sample(64, 80), sample(40, 50)] * 5
    draws = Draws(seeds(0, np.arange(10)), VIEW_DRAWS)
    views, masks = augmented(given, draws, 48, 64, (0.5, 2.0))
    assert all(not torch.equal(a, b) for n, a in enumerate(views) for b in views[:n])
    for number in range(10):
        alone = view(number, *given[number], 48, 64, (0.5, 2.0))
        assert torch.equal(alone[0], views[number]) and torch.equal(alone[1], masks[number])


def test_views_are_those_of_torchvision_bit_for_bit() -> None:
    """One by one, in the order of mmsegmentation, with torchvision's own changes."""
    from torchvision.transforms import v2

    jitters: list[dict[str, float]] = [
        {"brightness": 0.125},
        {"contrast": 0.5},
        {"saturation": 0.5},
        {"hue": 0.1},
    ]
    colours = v2.Compose([v2.RandomApply([v2.ColorJitter(**j)], 0.5) for j in jitters])
    source = np.random.default_rng(0)
    given = []
    for height, width in [(64, 80), (40, 50), (33, 33)] * 10:
        pixels = torch.from_numpy(source.integers(0, 256, (3, height, width), np.uint8))
        given.append((pixels, sample(height, width)[1] // 12))
    draws = Draws(seeds(5, np.arange(30)), VIEW_DRAWS)
    views, masks = augmented(given, draws, 48, 40, (0.6, 1.6))

    def uniform() -> float:
        return torch.rand(()).item()

    for number, (image, labels) in enumerate(given):
        with seeded(5, number):
            side = 40 * (0.6 + (1.6 - 0.6) * uniform())
            factor = side / min(labels.shape)
            size = [round(length * factor) for length in labels.shape]
            nearest = v2.InterpolationMode.NEAREST_EXACT
            image = v2.functional.resize(image, size, antialias=True)
            labels = v2.functional.resize(labels[None], size, interpolation=nearest)[0]
            for _ in range(10):
                top, left = (int(uniform() * (max(0, length - 48) + 1)) for length in size)
                cut = slice(top, top + 48), slice(left, left + 48)
                counts = labels[cut].flatten().bincount()
                if counts.max() < 0.75 * counts.sum():
                    break
            image, labels = image[:, cut[0], cut[1]], labels[cut]
            if uniform() < 0.5:
                image, labels = image.flip(-1), labels.flip(-1)
            image = normalized(colours(image))
        height, width = labels.shape
        assert torch.equal(views[number, :, :height, :width], image)
        assert torch.equal(masks[number, :height, :width], labels)
        assert (masks[number, height:] == IGNORED).all()
        assert (masks[number, :, width:] == IGNORED).all()
        assert not views[number, :, height:].any() and not views[number, :, :, width:].any()


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
