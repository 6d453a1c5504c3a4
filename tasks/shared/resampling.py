"""Resizing as products with matrices, so that each image of a batch may have a box of its own.

The weights are those of Pillow and of torchvision's `resize` with antialias=True: where an image
shrinks, the filter widens as much, and every pixel counts. `grid_sample` would skip pixels there,
and its cubic filter is another one.
"""

import torch
from torch import Tensor


def weights(first: Tensor, length: Tensor, size: int, whole: int, interpolation: str) -> Tensor:
    """Return the weights that resize stretches of a side of an image to `size` pixels.

    Args:
        first, length: stretches in pixels, [N] each. Pixels outside a stretch have no weight.
        size: pixels of the result.
        whole: pixels of the side.
        interpolation: "bilinear" or "bicubic".
    Returns:
        fp32 [N, size, whole]; rows add up to 1.
    """
    begin, step = first.float()[:, None], length.float()[:, None] / size
    centres = begin + torch.arange(0.5, size) * step
    pixels = torch.arange(0.5, whole)
    distance = (pixels - centres[..., None]).abs() / step.clamp(min=1)[..., None]
    found = _FILTERS[interpolation](distance)
    inside = (pixels > begin) & (pixels < begin + length[:, None])
    found *= inside[:, None]
    return found / found.sum(-1, keepdim=True)


def resized(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Resize images [B, C, H, W] with `weights` of each one's rows [B, h, H] and columns
    [B, w, W]. Returns levels from 0 to 255, fp32 [B, C, h, w]."""
    wide = torch.matmul(images.float(), right.mT[:, None]).clamp_(0, 255)
    return torch.matmul(down[:, None], wide).clamp_(0, 255)


def _linear(distance: Tensor) -> Tensor:
    return (1 - distance).clamp_(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Keys's filter with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, far * (distance < 2))


_FILTERS = {"bilinear": _linear, "bicubic": _cubic}
