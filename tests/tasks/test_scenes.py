"""The generated scenes: alike everywhere, labelled as drawn, and made quickly."""

import numpy as np

from tasks.ade20k.scenes import CLASSES, COUNTS, SIZE, Scenes, _inside, scenes
from tasks.ade20k.segmentation import IGNORED


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
