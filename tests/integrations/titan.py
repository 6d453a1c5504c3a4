"""torchtitan's debug model on CPUs, which torchtitan 0.3 does not know: `on_cpus` first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

LENGTH, BATCH, WORDS = 16, 2, 64


def on_cpus() -> None:
    """Put what CPUs have in the place of what torchtitan takes from GPUs. Before its import."""
    # The device: of several kinds that PyTorch may find, torchtitan takes the first.
    torch._utils._get_available_device_type = lambda: "cpu"
    meter: dict[str, Any] = {
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *_: {},
    }
    for name, value in meter.items():
        setattr(torch.cpu, name, value)
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)

    # FlexAttention has no backward pass on CPUs; here every sample is one document.
    from torchtitan.models.common.attention import FlexAttention

    def attention(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> tuple[Tensor, None]:
        options = {name: told[name] for name in ("scale", "enable_gqa")}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, **options), None

    FlexAttention._compiled_flex_attn = staticmethod(attention)


class Words(IterableDataset[Any]):
    """Numbers drawn for this rank alone."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.drawn = rank, world, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.drawn * self.world + self.rank)
            self.drawn += 1
            line = torch.randint(WORDS, (LENGTH + 1,), generator=generator)
            yield {"input": line[:-1], "positions": torch.arange(LENGTH)}, line[1:]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def batches(rank: int, world: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """What `Words` yields, as inputs and labels of so many steps."""
    lines = iter(Words(rank, world))
    found = []
    for _ in range(count):
        drawn = [next(lines) for _ in range(BATCH)]
        inputs = torch.stack([told["input"] for told, _ in drawn])
        found.append((inputs, torch.stack([labels for _, labels in drawn])))
    return found


# Any: torchtitan's, whose import costs seconds.
def config(folder: str, steps: int, shard: int = 2, tensor: int = 1, **checkpoint: Any) -> Any:
    """That of two replicas."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            infinite: bool = True

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
            words = Words(dp_rank, dp_world_size)
            super().__init__(words, dp_rank, dp_world_size, batch_size=BATCH)

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **options: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **options: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return WORDS

    made = llama3_debugmodel()
    made.model_spec.model.layers = made.model_spec.model.layers[:2]
    made.loss = made.loss.loss_fn
    made.dump_folder = folder
    made.dataloader, made.tokenizer = Loader.Config(), Tokenizer.Config()
    # Where a gradient is next to nothing, Adam's step depends on how sums are rounded, but for eps.
    made.optimizer = replace(default_adamw(lr=0.01, eps=1e-3), implementation="foreach")
    made.activation_checkpoint, made.comm.trace_buf_size = None, 0
    training = {"local_batch_size": BATCH, "seq_len": LENGTH, "steps": steps, "max_norm": 0.5}
    training |= {"mixed_precision_param": "float32", "disable_cuda_graphs": True}
    made.training = replace(made.training, **training)
    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": shard}
    degrees |= {"tensor_parallel_degree": tensor}
    made.parallelism = replace(made.parallelism, **degrees)
    made.checkpoint = replace(made.checkpoint, **checkpoint)
    return made


def trainer(made: Any, sync: Any) -> Any:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import debug

    from co2.integrations.torchtitan import SyncTrainer

    debug._clear_sharding_prop_cache()  # it names the mesh of the trainer before
    found = SyncTrainer(made, sync=sync)
    for module in found.module.modules():
        if isinstance(module, FSDPModule):
            # gloo cannot scale as it adds up.
            module.set_force_sum_reduction_for_comms(True)
    return found


def whole(module: Any) -> dict[str, Tensor]:
    """The weights of a replica. Collective in it."""
    state = module.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in state.items()
    }
