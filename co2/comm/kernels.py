"""Triton's kernels for what travels compressed: one launch where PyTorch needs many.

They make the same bits as PyTorch does in codec.py and sparse_mean.py, because every product and
every sum is rounded on its own.
"""

# A kernel's parameters are no Python objects, but pointers, numbers and constants of its compiler.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, Protocol

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024
"""Elements of one program. It has not been tuned: no GPU was at hand."""


class Codec(Protocol):
    """What these kernels read of a `Codec` of codec.py."""

    bits: int
    width: int
    starts: Tensor


class Chunks(Protocol):
    """What these kernels read of the `Chunks` of sparse_mean.py."""

    starts: Tensor
    widths: Tensor
    kept: Tensor
    firsts: Tensor
    widest: int
    most_kept: int


def encode(
    codec: Codec, x: Tensor, scales: Tensor, mask: Tensor | None, out: Tensor, error: Tensor
) -> None:
    """See `Codec.encode`."""
    vectors = (x, codec.starts, scales, x if mask is None else mask, out, error)
    sizes = (len(codec.starts), x.numel(), codec.width, out.shape[1], out.stride(0))
    _encode[_grid(codec, out)](*vectors, *sizes, MASKED=mask is not None, **_options(codec))


def decode(codec: Codec, packed: Tensor, scales: Tensor, mask: Tensor | None, out: Tensor) -> None:
    """See `Codec.decode`."""
    vectors = (packed, codec.starts, scales, out if mask is None else mask, out)
    sizes = (len(codec.starts), out.numel(), codec.width, packed.shape[1], packed.stride(0))
    _decode[_grid(codec, packed)](*vectors, *sizes, MASKED=mask is not None, **_options(codec))


def add(codec: Codec, packed: Tensor, scales: Tensor, out: Tensor) -> None:
    """See `Codec.add`."""
    messages, row_bytes = packed.shape
    vectors = (packed, codec.starts, scales, out)
    sizes = (len(codec.starts), out.numel(), row_bytes, packed.stride(0), scales.stride(0))
    _add[_grid(codec, packed[:1])](*vectors, *sizes, messages, **_options(codec))


def choose(error: Tensor, chunks: Chunks, numbers: Tensor, magnitudes: Tensor) -> None:
    """See `sparse_mean._choose`."""
    _choose[(len(chunks.starts),)](
        *(error, chunks.starts, chunks.widths, chunks.kept, chunks.firsts, numbers, magnitudes),
        COLUMNS=triton.next_power_of_2(chunks.widest),
        NUMBER_BITS=8 * error.element_size() - 1,
        num_warps=8,
        enable_fp_fusion=False,
    )


def spread(
    lower: Tensor, upper: Tensor, magnitudes: Tensor, chunks: Chunks, out: Tensor, sign: int
) -> None:
    """See `sparse_mean.Message.add`.

    Args:
        lower, upper: the parts of messages (messages, bytes), which need not be adjacent.
        magnitudes: (messages, chunks, 2), adjacent.
    """
    _spread[(len(chunks.starts),)](
        *(lower, upper, magnitudes, chunks.starts, chunks.kept, chunks.firsts, out),
        *(len(chunks.starts), len(lower), lower.stride(0)),
        SIGN=sign,
        SLOTS=triton.next_power_of_2(chunks.most_kept),
        enable_fp_fusion=False,
    )


def _grid(codec: Codec, packed: Tensor) -> tuple[int, int]:
    """The programs for each row, and the rows."""
    rows, row_bytes = packed.shape
    return triton.cdiv(row_bytes, _ELEMENTS * codec.bits // 8), rows


def _options(codec: Codec) -> dict[str, Any]:
    steps, block = (len(codec.starts) - 1).bit_length(), _ELEMENTS * codec.bits // 8
    return {"BITS": codec.bits, "STEPS": steps, "BYTES": block, "enable_fp_fusion": False}


@triton.jit
def _encode(
    x, starts, scales, mask, out, error, num_segments, numel, width, row_bytes, stride,
    MASKED: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    place, there = _places(row, byte, width, numel, BITS)
    value = tl.load(x + place, mask=there, other=0.0)
    s = tl.load(scales + _segment(starts, place, num_segments, STEPS), mask=there, other=0.0)
    code = tl.where(there, _code(value, s, BITS), 0)
    packed = tl.sum(code << _shifts(BITS), 1)
    tl.store(out + row * stride + byte, packed.to(tl.uint8), mask=byte < row_bytes)
    sent = _value(code, s, BITS)
    if MASKED:
        sent = sent * tl.load(mask + place, mask=there, other=0).to(sent.dtype)
    tl.store(error + place, value - sent, mask=there)


@triton.jit
def _decode(
    packed, starts, scales, mask, out, num_segments, numel, width, row_bytes, stride,
    MASKED: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    place, there = _places(row, byte, width, numel, BITS)
    s = tl.load(scales + _segment(starts, place, num_segments, STEPS), mask=there, other=0.0)
    codes = tl.load(packed + row * stride + byte, mask=byte < row_bytes, other=0)
    value = _value(_unpacked(codes, BITS), s, BITS)
    if MASKED:
        value = value * tl.load(mask + place, mask=there, other=0).to(value.dtype)
    tl.store(out + place, value, mask=there)


@triton.jit
def _add(
    packed, starts, scales, out, num_segments, numel, row_bytes, stride, scale_stride, messages,
    BITS: tl.constexpr, STEPS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    place, there = _places(0, byte, numel, numel, BITS)
    segment = _segment(starts, place, num_segments, STEPS)
    total = tl.zeros(place.shape, out.dtype.element_ty)
    for _ in range(messages):
        codes = tl.load(packed + byte, mask=byte < row_bytes, other=0)
        s = tl.load(scales + segment, mask=there, other=0.0)
        total += _value(_unpacked(codes, BITS), s, BITS)
        packed += stride
        scales += scale_stride
    tl.store(out + place, total, mask=there)


@triton.jit
def _places(row, byte, width, numel, BITS: tl.constexpr):
    """Where the elements are whose codes these bytes of a row hold, and which of them there are."""
    within = tl.arange(0, 8 // BITS)
    column = byte.to(tl.int64)[:, None] * (8 // BITS) + within[None, :]
    place = row * width + column
    return place, (column < width) & (place < numel)


@triton.jit
def _segment(starts, place, num_segments, STEPS: tl.constexpr):
    """The last segment that starts at a place or before it, by bisection in so many steps."""
    found = tl.zeros(place.shape, tl.int32)
    for step in tl.static_range(STEPS):
        middle = found + (1 << (STEPS - 1 - step))
        inside = middle < num_segments
        start = tl.load(starts + middle, mask=inside, other=0)
        found = tl.where(inside & (start <= place), middle, found)
    return found


@triton.jit
def _shifts(BITS: tl.constexpr):
    return (tl.arange(0, 8 // BITS) * BITS)[None, :]


@triton.jit
def _unpacked(byte, BITS: tl.constexpr):
    return (byte.to(tl.int32)[:, None] >> _shifts(BITS)) & ((1 << BITS) - 1)


@triton.jit
def _code(value, s, BITS: tl.constexpr):
    """See `Codec._codes`."""
    if BITS == 1:
        code = (value >= 0).to(tl.int32)
    else:
        largest: tl.constexpr = (1 << (BITS - 1)) - 1
        divisor = tl.where(s > 0, s, 1.0).to(s.dtype)
        multiple = tl.div_rn(value, divisor) if value.dtype == tl.float32 else value / divisor
        multiple = tl.minimum(tl.maximum(_round(multiple), -largest), largest)
        code = multiple.to(tl.int32) + largest
    return code


@triton.jit
def _round(x):
    """To the nearest whole number, and from the middle between two to the even one."""
    low = tl.floor(x)
    over = x - low
    odd = low != 2 * tl.floor(low * 0.5)
    return tl.where((over > 0.5) | ((over == 0.5) & odd), low + 1, low)


@triton.jit
def _value(code, s, BITS: tl.constexpr):
    """s times what the code stands for. See `Codec`."""
    level = 2 * code - 1 if BITS == 1 else code - ((1 << (BITS - 1)) - 1)
    return level.to(s.dtype) * s


@triton.jit
def _choose(
    error, starts, widths, kept, firsts, numbers, magnitudes,
    COLUMNS: tl.constexpr, NUMBER_BITS: tl.constexpr,
):  # fmt: skip
    """One chunk. The K-th largest size is found bit by bit: as whole numbers, sizes have the same
    order."""
    chunk = tl.program_id(0)
    count = tl.load(kept + chunk)
    column = tl.arange(0, COLUMNS)
    there = column < tl.load(widths + chunk)
    value = tl.load(error + tl.load(starts + chunk) + column, mask=there, other=0.0)
    size = tl.abs(value)
    size = tl.where(size == size, size, float("inf")).to(value.dtype)
    whole: tl.constexpr = tl.int32 if NUMBER_BITS == 31 else tl.int64
    key = tl.where(there, size.to(whole, bitcast=True), -1)
    least = tl.zeros([1], key.dtype)
    for step in tl.static_range(NUMBER_BITS):
        trial = least | (1 << (NUMBER_BITS - 1 - step))
        least = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= count, trial, least)
    taken, equal = key > least, key == least
    room = count - tl.sum(taken.to(tl.int32), 0)
    taken = taken | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    high = taken & (size >= _mean_where(taken, size).to(size.dtype))
    tl.store(magnitudes + 2 * chunk, _mean_where(taken ^ high, size).to(tl.float32))
    tl.store(magnitudes + 2 * chunk + 1, _mean_where(high, size).to(tl.float32))
    number = ((2 * high.to(tl.int32) + (value < 0).to(tl.int32)) << 12) + column
    place = tl.load(firsts + chunk) + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(numbers + place, number.to(tl.int64), mask=taken)


@triton.jit
def _mean_where(some, size):
    count = tl.maximum(tl.sum(some.to(tl.int32), 0), 1)
    return tl.sum(tl.where(some, size, 0.0).to(tl.float64), 0) / count.to(tl.float64)


@triton.jit
def _spread(
    lower, upper, magnitudes, starts, kept, firsts, out, chunks, messages, stride,
    SIGN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One chunk, of all messages."""
    chunk = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    there = slot < tl.load(kept + chunk)
    number = tl.load(firsts + chunk) + slot
    group, shift = number // 4, (number % 4) * 6
    first = out + tl.load(starts + chunk)
    for _ in range(messages):
        four = tl.load(upper + 3 * group, mask=there, other=0).to(tl.int32)
        four |= tl.load(upper + 3 * group + 1, mask=there, other=0).to(tl.int32) << 8
        four |= tl.load(upper + 3 * group + 2, mask=there, other=0).to(tl.int32) << 16
        bits = (four >> shift) & 63
        column = tl.load(lower + number, mask=there, other=0).to(tl.int32) + ((bits & 15) << 8)
        size = tl.load(magnitudes + 2 * chunk + (bits >> 5), mask=there, other=0.0)
        value = tl.where(((bits >> 4) & 1) == 1, -size, size)
        before = tl.load(first + column, mask=there, other=0.0)
        tl.store(first + column, before + SIGN * value, mask=there)
        # Another thread may add the next message's value to the same element.
        tl.debug_barrier()
        lower += stride
        upper += stride
        magnitudes += 2 * chunks
