"""Compressors: one to eight bits for each element, and a scale for all of them.

    sign   C(x) = s·sign(x), sign(0) = +1     s = ‖x‖₂/√n         (1-bit Adam, arXiv 2102.02888)
    int4   C(x) = s·round(x/s)                s = max|x|/7
    int8   C(x) = s·round(x/s)                s = max|x|/127

One scale covers one parameter tensor, or the part of it that a server owns (co2/comm/exchange.py).
Scales stay on the device of x, so that the host never waits for a GPU.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_PIECE = 1 << 20
"""Elements squared at a time, which bounds the temporaries."""


class Compressor(Protocol):
    """Turns a tensor into a scale and small whole numbers, the codes, and back."""

    @property
    def bits(self) -> int:
        """Bits of an element: 1, 2, 4 or 8."""

    def scales(self, tensors: Sequence[Tensor], counts: Tensor) -> Tensor:
        """Return the s of each of these tensors, (tensors,).

        Args:
            counts: their n (tensors,), at least 1.
        """
        ...

    def codes(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the codes of x (k,): whole numbers (k,) from 0 to 2^bits − 1, of any type.

        Args:
            s: (k,), or (1,) for all elements.
        """
        ...

    def values_(self, codes: Tensor, s: Tensor) -> None:
        """Overwrite codes (k,), given in a floating-point type, with C(x). s is as in `codes`."""
        ...


class Sign:
    """One bit: the sign of an element."""

    bits = 1

    def scales(self, tensors: Sequence[Tensor], counts: Tensor) -> Tensor:
        return torch.sqrt(torch.stack([_squares(x) for x in tensors]) / counts)

    def codes(self, x: Tensor, s: Tensor) -> Tensor:
        return x >= 0

    def values_(self, codes: Tensor, s: Tensor) -> None:
        codes.mul_(2).sub_(1).mul_(s)


class Uniform:
    """Whole multiples of s, as many above 0 as below."""

    def __init__(self, bits: int) -> None:
        self.bits, self.largest = bits, 2 ** (bits - 1) - 1

    def scales(self, tensors: Sequence[Tensor], counts: Tensor) -> Tensor:
        largest = [torch.linalg.vector_norm(x, math.inf) for x in tensors]
        return torch.stack(largest) / self.largest

    def codes(self, x: Tensor, s: Tensor) -> Tensor:
        multiples = torch.div(x, s.where(s > 0, 1)).round_()
        # An s close to 0 is rounded so coarsely that max|x| may be more multiples of it.
        return multiples.clamp_(-self.largest, self.largest).add_(self.largest)

    def values_(self, codes: Tensor, s: Tensor) -> None:
        codes.sub_(self.largest).mul_(s)


COMPRESSORS: dict[str, Compressor] = {"sign": Sign(), "int4": Uniform(4), "int8": Uniform(8)}


def _squares(x: Tensor) -> Tensor:
    """Return the sum of squares of x.

    BLAS would add in an order that depends on the address of x, so that a resumed run might differ.
    """
    if x.numel() <= _PIECE:  # to split and stack would take most of the time
        return x.square().sum()
    return torch.stack([piece.square().sum() for piece in x.split(_PIECE)]).sum()


def num_bytes(numel: int, bits: int) -> int:
    """Return the bytes that `pack` needs for so many codes."""
    return -(-numel * bits // 8)


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write codes (k,) into `out` (num_bytes(k, bits),), uint8.

    Byte j holds the codes j, j + len(out), …, so that whole planes are shifted at once.
    """
    padded = torch.zeros(8 // bits * out.numel(), dtype=torch.uint8, device=codes.device)
    padded[: codes.numel()].copy_(codes)
    planes = padded.view(8 // bits, -1).bitwise_left_shift_(_shifts(bits, codes.device))
    torch.sum(planes, dim=0, dtype=torch.uint8, out=out)


def unpack(packed: Tensor, bits: int, out: Tensor) -> None:
    """Write the codes that `pack` has put into `packed` to `out` (k,), of any type."""
    planes = torch.bitwise_right_shift(packed.unsqueeze(0), _shifts(bits, packed.device))
    out.copy_(planes.bitwise_and_(2**bits - 1).view(-1)[: out.numel()])


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device).unsqueeze(1)
