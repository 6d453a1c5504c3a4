"""GPUs by name: their memory, and the rate that model FLOP utilization is measured against. Several
workers on one GPU."""

import os
import re
from dataclasses import dataclass

from co2.errors import nearest, require

USABLE = 0.95
"""Share of a GPU's memory that tensors can fill. CUDA's context, NCCL's buffers and gaps between
blocks take the rest: assumed."""


@dataclass(frozen=True)
class GPU:
    """A kind of GPU."""

    memory_gib: int
    """As its vendor names it, who writes GB."""
    peak_flops: float
    """Dense peak in flop/s of bf16 products that are added in fp32; of a V100, of fp16."""
    device: str
    """Regular expression for the name that the driver gives."""

    @property
    def usable_bytes(self) -> int:
        """What tensors can fill."""
        return int(USABLE * self.memory_gib * 2**30)


GPUS = {
    "v100-16g": GPU(16, 125e12, "V100.*16GB"),
    "v100-32g": GPU(32, 125e12, "V100.*32GB"),
    "a100-40g": GPU(40, 312e12, "A100.*40GB"),
    "a100-80g": GPU(80, 312e12, "A100.*80GB"),
    "h100": GPU(80, 989e12, "H100 80GB HBM3"),
    "h100-pcie": GPU(80, 756e12, "H100 PCIe"),
    "h200": GPU(141, 989e12, "H200"),
    "b200": GPU(180, 2250e12, "B200"),
    "a10": GPU(24, 125e12, "A10"),
    "l4": GPU(24, 121e12, "L4"),
    "l40s": GPU(48, 362e12, "L40S"),
    "rtx3090": GPU(24, 71e12, "RTX 3090"),
    "rtx4090": GPU(24, 165e12, "RTX 4090"),
}
"""From NVIDIA's data sheets of each, where a rate "with sparsity" is halved; of RTX cards, from the
white papers of GA102 and AD102, which rate sums in fp32 apart."""


def known_gpu(key: str, name: str) -> GPU:
    """The GPU of this name in `GPUS`. Raises `ConfigError`."""
    begun = [known for known in GPUS if known.startswith(name)]
    hint = f"it has {', '.join(begun)}" if begun else nearest(name, GPUS)
    require(name in GPUS, key, name, f"no GPU of the table; {hint}")
    return GPUS[name]


def gpu_of(device: str) -> GPU | None:
    """The GPU that a driver calls so, such as "NVIDIA A100-SXM4-80GB"; None if it is not known."""
    return next((gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.device}\b", device)), None)


ON_ONE_MACHINE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""How NCCL sends where all workers are on one machine that it takes for several."""


def share() -> None:
    """Let this process use NCCL on a GPU that other workers of this machine share.

    NCCL refuses two workers on one GPU unless it takes them for two machines. It then sends through
    the sockets of this machine. Call it before the first collective of NCCL's.
    """
    os.environ["NCCL_HOSTID"] = f"process{os.getpid()}"
    for name, value in ON_ONE_MACHINE.items():
        os.environ.setdefault(name, value)
