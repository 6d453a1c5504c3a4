"""Labelled scenes: what they show, random views of them, and the metrics of segmentation."""

import colorsys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tasks.ade20k.scenes import CLASSES, COUNTS, SIZE, Scenes, _inside, scenes
from tasks.ade20k.segmentation import (
    _MEAN,
    _STD,
    IGNORED,
    confusion,
    cross_entropy,
    enlarged,
    normalized,
    scores,
    whole,
)
from tasks.ade20k.views import COLOUR_DRAWS, Views, distorted
from tasks.shared.randomness import uniforms


def test_shapes_and_classes() -> None:
    for split, number in COUNTS.items():
        images, labels = scenes(split)
        assert images.shape == (number, 3, SIZE, SIZE) and images.dtype == np.uint8
        assert labels.shape == (number, SIZE, SIZE) and labels.dtype == np.uint8
        assert set(np.unique(labels)) == {*range(len(CLASSES)), IGNORED}
        shares = np.bincount(labels.ravel(), minlength=IGNORED + 1) / labels.size
        assert shares[0] < 0.75 and shares[1 : len(CLASSES)].min() > 0.02
        assert 0.02 < shares[IGNORED] < 0.1


def test_every_second_scene_has_a_rectangle_without_labels() -> None:
    _, labels = scenes("validation")
    for number, scene in enumerate(labels):
        rows, columns = np.nonzero(scene == IGNORED)
        if number % 2:
            assert len(rows) == 0
        else:
            height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
            assert len(rows) == height * width and height >= 6 and width >= 6


def test_a_shape_differs_in_colour_from_what_lies_under_it() -> None:
    """Noise is small beside the steps at borders, or nobody could tell the shapes."""
    images, labels = scenes("validation")
    steps = np.abs(np.diff(images.astype(float), axis=3)).max(1)
    borders = (labels[:, :, 1:] != labels[:, :, :-1]) & (labels[:, :, 1:] != IGNORED)
    borders &= labels[:, :, :-1] != IGNORED
    inside = labels[:, :, 1:] == labels[:, :, :-1]
    assert np.median(steps[borders]) > 3 * np.median(steps[inside])


def test_the_shapes_themselves() -> None:
    x, y = np.meshgrid(np.linspace(-1.5, 1.5, 301), np.linspace(-1.5, 1.5, 301))
    areas = {kind: _inside(kind, x, y).mean() * 9 for kind in CLASSES[1:]}
    expected = {
        "disc": np.pi,
        "square": 1.6**2,
        "triangle": 1.6**2 / 1.85,
        "ring": 0.7 * np.pi,
        "cross": 2 * 2 * 0.56 - 0.56**2,
    }
    for kind, area in expected.items():
        assert abs(areas[kind] / area - 1) < 0.05, kind
    for kind in CLASSES[1:]:
        reach = np.hypot(x, y)[_inside(kind, x, y)].max()
        assert 0.9 < reach < 1.2, kind


def test_training_and_validation_differ() -> None:
    training, validation = (scenes(split)[0] for split in ("training", "validation"))
    assert not {image.tobytes() for image in training} & {image.tobytes() for image in validation}


def test_they_depend_on_nothing_that_happened_before() -> None:
    again = scenes.__wrapped__("validation")
    assert all(np.array_equal(*both) for both in zip(again, scenes("validation"), strict=True))
    assert Scenes("training").digest() != Scenes("validation").digest()


def test_one_by_one() -> None:
    samples, (images, labels) = Scenes("validation"), scenes("validation")
    assert len(samples) == len(images)
    image, truth = samples[7]
    assert (image.numpy() == images[7]).all() and (truth.numpy() == labels[7]).all()
    assert (samples.labels(7) == truth).all()


def drawn(number: int, colours: bool = False) -> np.ndarray:
    """The random numbers of views, without changes of colour unless asked for."""
    draws = uniforms(Views.draws, 7, np.arange(number))
    if not colours:
        draws[:, -COLOUR_DRAWS:] = 0.75
    return draws


def sample(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The image tells its own label: red is 10 times the class, in blocks of 8 pixels."""
    source = np.random.default_rng(height)
    blocks = source.integers(0, 20, (height // 8 + 1, width // 8 + 1), np.uint8)
    labels = torch.from_numpy(blocks.repeat(8, 0).repeat(8, 1)[:height, :width])
    image = torch.stack([labels * 10, torch.full_like(labels, 7), torch.full_like(labels, 9)])
    return image, labels


def levels(views: torch.Tensor) -> torch.Tensor:
    """Pixels from 0 to 255 of normalized ones."""
    mean, deviation = (torch.tensor(rgb)[:, None, None] for rgb in (_MEAN, _STD))
    return views * deviation + mean


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0)])
def test_image_and_labels_stay_together(scales: tuple[float, float]) -> None:
    views, labels = Views(48, 64, scales)([sample(64, 80)] * 20, drawn(20))
    assert views.shape == (20, 3, 48, 48) and views.dtype == torch.float32
    assert labels.shape == (20, 48, 48) and labels.dtype == torch.uint8
    inside = F.max_pool2d(labels.float(), 5, 1, 2) == labels
    inside &= -F.max_pool2d(-labels.float(), 5, 1, 2) == labels
    inside &= labels != IGNORED
    inside[:, [0, 1, -2, -1]] = False  # resizing mixes at borders, of the view too
    inside[:, :, [0, 1, -2, -1]] = False
    assert inside.sum() > 2000
    difference = levels(views)[:, 0] - labels.float() * 10
    assert (difference[inside].abs() < 6).all()


@pytest.mark.parametrize(
    ("short_side", "scales"), [(32, (0.75, 1.5)), (32, (0.4, 3.0)), (40, (1.0, 1.0))]
)
def test_a_batch_is_cut_as_one_by_one(short_side: int, scales: tuple[float, float]) -> None:
    chosen, cut = np.arange(64), Views(32, short_side, scales)
    images, labels = Scenes("training").take(chosen)
    for colours in (False, True):
        draws = drawn(64, colours)
        views, seen = cut((images, labels), draws)
        others, expected = cut(list(zip(images, labels, strict=True)), draws)
        assert torch.equal(seen, expected)
        off = (levels(views) - levels(others)).abs()
        assert off.mean() < 0.3
        assert colours or off.max() < 1.01  # a level, which changes of colour multiply
    for n in (0, 63):  # and a view does not depend on the others
        alone = cut((images[n : n + 1], labels[n : n + 1]), draws[n : n + 1])
        assert torch.equal(alone[0][0], views[n]) and torch.equal(alone[1][0], seen[n])


def test_what_the_image_does_not_fill_has_no_label() -> None:
    views, labels = Views(64, 40, (1.0, 1.0))([sample(40, 80)], drawn(1, colours=True))
    assert (labels[0, 40:] == IGNORED).all() and (views[0, :, 40:] == 0).all()
    assert (labels[0, :40] != IGNORED).all()


def test_views_vary_and_leave_the_samples_alone() -> None:
    image, labels = sample(64, 80)
    views, _ = Views(48, 64, (0.5, 2.0))([(image, labels)] * 10, drawn(10, colours=True))
    assert all(not torch.equal(a, b) for n, a in enumerate(views) for b in views[:n])
    assert torch.equal(image, sample(64, 80)[0]) and torch.equal(labels, sample(64, 80)[1])
    scenes = Scenes("training")
    before = scenes.digest()
    Views(32, 32, (1.0, 1.0))(scenes.take(np.arange(9)), drawn(9, colours=True))
    assert scenes.digest() == before


def test_both_halves_of_the_coin() -> None:
    """A flip in about half of the views, and every scale between the two."""
    image = torch.zeros(200, 3, SIZE, SIZE, dtype=torch.uint8)
    labels = torch.arange(SIZE, dtype=torch.uint8).expand(200, SIZE, SIZE)  # by column
    flips, filled = [], []
    for seen in Views(64, SIZE, (0.5, 2.0))((image, labels), drawn(200))[1]:
        known = seen[0][seen[0] != IGNORED].int()
        flips.append(bool(known[0] > known[-1]))
        filled.append(len(known))
    assert 70 < sum(flips) < 130
    assert 16 <= min(filled) < 20 and 60 < max(filled) <= 64 and len(set(filled)) > 30


def test_no_class_fills_a_crop_where_that_can_be() -> None:
    labels = torch.zeros(64, 256, dtype=torch.uint8)
    labels[:, 96:] = torch.arange(160, dtype=torch.uint8).clamp(max=99) % 5 + 1
    image = labels.expand(3, -1, -1).contiguous()
    cut = Views(64, 64, (1.0, 1.0))
    shares = (cut([(image, labels)] * 60, drawn(60))[1] == 0).float().mean((1, 2))
    assert shares.max() < 0.75 and shares.max() > 0.3
    bare = torch.zeros(64, 64, dtype=torch.uint8)
    # Ten tries, then as it is.
    assert (Views(48, 64, (1.0, 1.0))([(image[:, :, :64], bare)], drawn(1))[1] == 0).all()


def photometric(pixel: list[float], draws: np.ndarray) -> list[float]:
    """mmsegmentation's PhotoMetricDistortion of one pixel, with the standard library's HSV."""
    made, amounts, contrast_first = draws[:4] < 0.5, draws[4:8], draws[8] < 0.5

    def clipped(pixel: list[float]) -> list[float]:
        return [min(max(level, 0.0), 255.0) for level in pixel]

    def contrasted(pixel: list[float]) -> list[float]:
        return clipped([level * (0.5 + amounts[1]) for level in pixel]) if made[1] else pixel

    if made[0]:
        pixel = clipped([level + 32 * (2 * amounts[0] - 1) for level in pixel])
    if contrast_first:
        pixel = contrasted(pixel)
    hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
    if made[2]:
        saturation = min(saturation * (0.5 + amounts[2]), 1.0)
    if made[3]:
        hue = (hue + 18 / 180 * (2 * amounts[3] - 1)) % 1
    pixel = list(colorsys.hsv_to_rgb(hue, saturation, value))
    return pixel if contrast_first else contrasted(pixel)


def test_colours_change_as_in_mmsegmentation() -> None:
    images = torch.randint(
        0, 256, (200, 3, 2, 3), generator=torch.Generator().manual_seed(0)
    ).float()
    images[:9] = torch.tensor([0.0, 128.0, 255.0])  # greys, which have no hue
    draws = uniforms(COLOUR_DRAWS, 1, np.arange(200))
    before, found = images.clone(), distorted(images, draws)
    assert torch.equal(images, before)
    for image, row, other in zip(images, draws, found, strict=True):
        pixels = image.flatten(1).T.tolist()
        changed = [photometric(pixel, row) for pixel in pixels]
        expected = torch.tensor(changed, dtype=torch.float32).T.view(3, 2, 3)
        assert torch.allclose(other, expected, atol=2e-3)
    kept = (draws[:, :4] >= 0.5).all(1)
    assert kept.any() and torch.equal(found[kept], images[kept])


NUM_CLASSES = 6


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
    for kind in range(NUM_CLASSES):
        truth = {pixel for pixel in pixels if labels[pixel] == kind}
        found = {pixel for pixel in pixels if predicted[pixel] == kind}
        if truth | found:
            ious.append(len(truth & found) / len(truth | found))
    right = sum(int(labels[pixel]) == int(predicted[pixel]) for pixel in pixels)
    result = scores(confusion(predicted, labels, NUM_CLASSES))
    assert len(ious) == 5
    assert result == pytest.approx(
        {"miou": sum(ious) / 5, "pixel_accuracy": right / len(pixels)}, rel=1e-12
    )


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import confusion_matrix, jaccard_score

    predicted, labels = labelled(4, 31, 7, seed=1)
    kept = labels != IGNORED
    given = (labels[kept].numpy(), predicted[kept].numpy())
    counts = confusion(predicted, labels, NUM_CLASSES)
    assert (counts.numpy() == confusion_matrix(*given, labels=range(NUM_CLASSES))).all()
    assert scores(counts)["miou"] == pytest.approx(jaccard_score(*given, average="macro"))


def test_pixels_without_labels_count_nowhere() -> None:
    predicted, labels = labelled(2, 20, 20)
    before = confusion(predicted, labels, NUM_CLASSES)
    predicted[labels == IGNORED] = 5
    assert torch.equal(confusion(predicted, labels, NUM_CLASSES), before)
    logits = torch.randn(2, NUM_CLASSES, 20, 20)
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
