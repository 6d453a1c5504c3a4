"""What each method holds on a worker between steps: predicted by the ledger, and measured.

Two workers train GPT-2's smoke shape for a few rounds. On a CPU every storage that a tensor in the
process holds is counted; on a GPU, what the allocator has handed out.
"""

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import co2
from benchmarks import report
from co2 import meters
from co2.config import CommConfig, Precision

WORKERS, TAU, ROUNDS = 2, 2, 3
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="of a square layer; there are eight")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    gpus = torch.cuda.device_count() >= WORKERS
    rows = []
    for wire in Precision:
        for name in co2.METHODS:
            if wire is Precision.bf16 and name in COMPRESSED:
                continue  # they send signs, whatever the wire
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder)
                mp.spawn(measure, (path, name, wire, args.width, gpus), nprocs=WORKERS)
                found = torch.load(path / "measured.pt", weights_only=True)
            predicted = sum(found[key] for key in PARTS)
            difference = found["measured"] / predicted - 1
            rows.append(
                [
                    name,
                    wire.name,
                    f"{found['copies']:g}",
                    *(f"{found[key] / MIB:.1f}" for key in PARTS),
                    f"{predicted / MIB:.1f}",
                    f"{found['measured'] / MIB:.1f}",
                    f"{difference:+.1%}",
                ]
            )
            print(*rows[-1], sep="  ", flush=True)
    report.write(
        args.out / f"memory_{'cuda' if gpus else 'cpu'}.md",
        "Memory of a worker between steps, MiB",
        f"{8 * args.width**2:,} parameters in fp32, AdamW, {WORKERS} workers, τ = {TAU}, after "
        f"{ROUNDS} rounds. Predicted: parameters, gradients, inner state, the method's copies of "
        "the parameters, and one chunk of scratch, which does not grow with the model. "
        "With bf16 on the wire the communication buffer is half as large; DDP's rounded gradients "
        "live for a moment only, and may be gone when they are counted.",
        [
            "method",
            "wire",
            "copies",
            "parameters",
            "gradients",
            "inner state",
            "copies, MiB",
            "scratch",
            "predicted",
            "measured",
            "difference",
        ],
        rows,
    )


COMPRESSED = ("onebit_adam", "zero_one_adam")
PARTS = ("parameter_bytes", "gradient_bytes", "inner_state_bytes", "extra_bytes", "scratch_bytes")


def measure(rank: int, folder: Path, name: str, wire: Precision, width: int, gpus: bool) -> None:
    """One worker; the first writes what it found."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    store = f"file://{folder / 'store'}"
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=WORKERS)
    before = held(device)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rounds = name not in ("allreduce", *COMPRESSED)
    config = co2.METHODS[name].Config(**({"tau": TAU} if rounds else {}))
    method = co2.METHODS[name](config, CommConfig(dtype=wire))
    wrapped = method.prepare(model, optimizer, co2.Mesh.world(device=device))
    for _ in range(ROUNDS * TAU):
        wrapped(torch.randn(4, width, device=device)).square().mean().backward()
        method.step()
    ledger: dict[str, Any] = meters.ledger(model, optimizer, method.copies, method.scratch_bytes)
    ledger |= {"measured": held(device) - before, "copies": method.copies}
    method.flush()
    if rank == 0:
        torch.save(ledger, folder / "measured.pt")
    dist.barrier()
    dist.destroy_process_group()


def held(device: torch.device) -> int:
    """Bytes that tensors of this process hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


if __name__ == "__main__":
    main()
