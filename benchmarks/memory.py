"""The memory that each method holds on a worker between steps, predicted and measured.

Two workers train a small model for a few rounds. On a CPU the benchmark counts every storage that a
tensor of the process holds; on a GPU, what the allocator has handed out.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import co2
from benchmarks import report
from co2.catalogue import CATALOGUE
from co2.config import CommConfig, CommDevice, Precision
from co2.train import meters

WORKERS, TAU, ROUNDS = 2, 2, 3
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="of a square layer; there are eight")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    gpus = torch.cuda.device_count() >= WORKERS
    rows = []
    for name, fields, comm in cells(gpus):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            mp.spawn(measure, (path, name, fields, comm, args.width, gpus), nprocs=WORKERS)
            found = torch.load(path / "measured.pt", weights_only=True)
        options = [f"{key}={value}".lower() for key, value in fields.items() if key != "tau"]
        rows.append(row(", ".join([name, *options]), comm, found, gpus))
        print(*rows[-1], sep="  ", flush=True)
    report.write(
        args.out / f"memory_{'cuda' if gpus else 'cpu'}.md",
        "Memory of a worker between steps, MiB",
        f"{8 * args.width**2:,} parameters in fp32, AdamW, {WORKERS} workers, τ = {TAU}, after "
        f"{ROUNDS} rounds. Predicted: parameters, gradients, inner state, the method's copies of "
        "the parameters, and a chunk or two of scratch, which do not grow with the model. "
        "With bf16 on the wire the communication buffer is half as large; DDP's rounded gradients "
        "live for a moment only, and may be gone when they are counted."
        + (" With comm.device=cpu copies and scratch are in the host's memory." if gpus else ""),
        [
            "method",
            "wire",
            *(["comm.device"] if gpus else []),
            "copies",
            "parameters",
            "gradients",
            "inner state",
            "copies, MiB",
            "scratch",
            "predicted",
            "measured",
            "difference",
            *(["on the host, predicted", "measured"] if gpus else []),
        ],
        rows,
    )


def cells(gpus: bool) -> Iterator[tuple[str, dict[str, Any], CommConfig]]:
    """Every method with its fields and its communication settings."""
    for keep in CommDevice if gpus else [CommDevice.auto]:
        for wire in Precision:
            comm = CommConfig(dtype=wire, device=keep)
            for name in co2.METHODS:
                rounded = wire is Precision.bf16 and name in FP32_ONLY
                if comm == CommConfig() or (name not in REFUSED[keep] and not rounded):
                    yield name, {} if name in NO_ROUNDS else {"tau": TAU}, comm
            if (wire, keep) == (Precision.fp32, CommDevice.auto):
                yield "co2", {"tau": TAU, "shard": True}, comm


def row(name: str, comm: CommConfig, found: dict[str, Any], gpus: bool) -> list[str]:
    predicted = sum(found[key] for key in PARTS)
    host = [f"{found[key] / MIB:.1f}" for key in ("host_bytes", "host_measured")]
    return [
        name,
        comm.dtype.name,
        *([comm.device.name] if gpus else []),
        f"{found['copies']:g}",
        *(f"{found[key] / MIB:.1f}" for key in PARTS),
        f"{predicted / MIB:.1f}",
        f"{found['measured'] / MIB:.1f}",
        f"{found['measured'] / predicted - 1:+.1%}",
        *(host if gpus else []),
    ]


COMPRESSED = ("demo", "onebit_adam", "zero_one_adam")
NO_ROUNDS = tuple(name for name, entry in CATALOGUE.items() if not entry.rounds)
REFUSED = {CommDevice.auto: COMPRESSED, CommDevice.cpu: NO_ROUNDS}
"""By comm.device, the methods that accept nothing but the defaults of comm."""
FP32_ONLY = ("sparseloco", "noloco", "sparta")
"""Methods that refuse comm.dtype=bf16 alone."""
PARTS = ("parameter_bytes", "gradient_bytes", "inner_state_bytes", "extra_bytes", "scratch_bytes")


def measure(
    rank: int,
    folder: Path,
    name: str,
    fields: dict[str, Any],
    comm: CommConfig,
    width: int,
    gpus: bool,
) -> None:
    """Train as one worker and measure; worker 0 writes what it found."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    store = f"file://{folder / 'store'}"
    nccl = gpus and comm.device is CommDevice.auto
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=WORKERS)
    before, host_before = held(device), held(torch.device("cpu"))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).to(device)
    kind = torch.optim.SGD if name == "demo" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    method = co2.METHODS[name](co2.METHODS[name].Config(**fields), comm)
    wrapped = method.prepare(model, optimizer, co2.Mesh.world(device=device))
    for _ in range(ROUNDS * TAU):
        wrapped(torch.randn(4, width, device=device)).square().mean().backward()
        method.step()
    method.state_dict()  # what is in flight is brought in, and holds nothing besides
    ledger: dict[str, Any] = asdict(meters.ledger(model, optimizer, method))
    ledger |= {"measured": held(device) - before, "copies": method.extra_copies}
    ledger["host_measured"] = held(torch.device("cpu")) - host_before
    method.flush()
    if rank == 0:
        torch.save(ledger, folder / "measured.pt")
    dist.barrier()
    dist.destroy_process_group()


def held(device: torch.device) -> int:
    """Bytes that tensors of this process hold on a device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device == device:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


if __name__ == "__main__":
    main()
