"""Compressed means under Triton's interpreter, as a program that runs with TRITON_INTERPRET=1.

The interpreter has to be chosen before Triton is imported, and the tests' own processes may have
done that. So this one reads pickled cases, and writes what comes out of them.
"""

import pickle
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

import co2
from co2.comm.background_mean import BackgroundMean
from co2.comm.codec import BITS, Codec
from co2.comm.sparse_mean import SparseMean


@dataclass
class Case:
    """What a few replicas send."""

    kind: str
    sizes: list[int]
    dtype: torch.dtype = torch.float32
    rows: int = 1
    masked: bool = False
    density: float = 0.02
    poisoned: bool = False
    """Whether an element is no number."""


def results(case: Case, device: str = "cpu") -> list[Tensor]:
    """Messages, errors, and what is read from the messages."""
    numel, generator = sum(case.sizes), torch.Generator().manual_seed(3)
    vectors = torch.randn(3, numel, generator=generator, dtype=torch.float64).to(case.dtype)
    vectors *= torch.linspace(0.1, 3, numel, dtype=case.dtype)
    vectors[:, numel // 2] = 0
    if case.poisoned:
        vectors[1, numel // 3] = torch.nan
    found = (sparse if case.kind == "sparse" else quantized)(case, vectors.to(device))
    return [tensor.cpu().nan_to_num(nan=12345) for tensor in found]


def quantized(case: Case, vectors: Tensor) -> list[Tensor]:
    numel, bits = vectors.shape[1], BITS[case.kind]
    width = -(-numel // case.rows)
    codec = Codec(bits, case.sizes, width, vectors, len(vectors))
    mask = torch.arange(numel, device=vectors.device) % 3 > 0 if case.masked else None
    if mask is not None:
        vectors *= mask
    parts = [list(vector.split(case.sizes)) for vector in vectors]
    # On the CPU: a GPU divides by a number as if it multiplied by the inverse.
    largest = torch.stack([torch.stack([part.abs().max() for part in of]) for of in parts])
    scales = (largest.cpu() / 7).to(vectors.device)
    # Rows of a message need not be adjacent.
    packed = vectors.new_zeros(3, case.rows, codec.row_bytes + 5, dtype=torch.uint8)[..., 2:-3]
    errors, read = torch.empty_like(vectors), torch.empty_like(vectors)
    for number in range(3):
        codec.encode(vectors[number], scales[number], mask, packed[number], errors[number])
        codec.decode(packed[number], scales[number], mask, read[number])
    found = [packed, errors, read]
    if case.rows == 1:
        total = torch.empty_like(vectors[0])
        codec.add(packed[:, 0], scales, total)
        found.append(total)
    return found


def sparse(case: Case, vectors: Tensor) -> list[Tensor]:
    mesh = co2.Mesh.world(device=vectors.device)
    mean = BackgroundMean(vectors.shape[1], mesh, dtype=vectors.dtype, device=vectors.device)
    few = SparseMean(case.sizes, mesh, mean, case.density, 0.5)
    messages, errors = [], []
    for vector in vectors:
        few.mean_(vector.clone())
        messages.append(few.messages()["sent"].clone())
        errors.append(few.error.clone())
    total = torch.zeros_like(vectors[0])
    (message,) = few._messages
    message.add(torch.stack(messages), total, 1)
    return [*messages, *errors, total]


def main() -> None:
    pickle.dump([results(case) for case in pickle.load(sys.stdin.buffer)], sys.stdout.buffer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
