"""Metrics of segmentation, against plain computations."""

import numpy as np
import pytest
import torch

from tasks.ade20k.segmentation import (
    IGNORED,
    confusion,
    cross_entropy,
    enlarged,
    normalized,
    scores,
    whole,
)

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


def test_whole_images_keep_their_shape() -> None:
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    assert whole(image, 32).shape == (3, 32, 48)
    assert torch.equal(whole(image, 64), normalized(image))
    assert whole(image[:, :20].repeat(1, 1, 5)[:, :, :400], 32).shape == (
        3,
        6,
        128,
    )  # the long side is at most 4 × 32
    mean = torch.tensor([123.675, 116.28, 103.53])[:, None, None]
    deviation = torch.tensor([58.395, 57.12, 57.375])[:, None, None]
    assert torch.allclose(normalized(mean.expand(3, 2, 2)), torch.zeros(3, 2, 2))
    assert torch.allclose(normalized((mean + deviation).expand(3, 2, 2)), torch.ones(3, 2, 2))
