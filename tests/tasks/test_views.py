"""Random views of labelled images: geometry, colours, and batches against single images."""

import colorsys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tasks.ade20k.scenes import SIZE, Scenes
from tasks.ade20k.segmentation import _MEAN, _STD, IGNORED
from tasks.ade20k.views import COLOUR_DRAWS, Views, distorted
from tasks.shared.randomness import uniforms


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
