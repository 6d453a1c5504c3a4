"""What a step takes, worked out from shapes alone: memory, and floating-point operations.

Model, optimizer and method are the run's own, of meta tensors: a model of 7 billion
parameters takes seconds and no memory. What is held between steps comes from the device "meta". A
micro-batch goes through fake tensors (torch._subclasses), which are meta tensors that name a
device: without one there is no autocast. What these hold is counted as on a CPU. A GPU's other
kernels may keep other tensors, and torch.compile keeps fewer.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from co2.comm.mesh import Mesh
from co2.config import CommDevice, Config, Precision, Strategy
from co2.errors import ConfigError, require
from co2.methods import METHODS
from co2.record.metrics import Ledger
from co2.task import Planned, Task
from co2.train.expert_parallel import Divisible
from co2.train.meters import ledger
from co2.train.moving_average import MovingAverage
from co2.train.within_replica import CUT, blocks, checkpoint_activations, gathered_as

_STEPS = 3
"""After which a method and its inner optimizer hold all that they ever hold between exchanges. ACCO
is the last: its third inner step is the first that keeps its state."""


class Unknown(ConfigError):
    """What a step takes cannot be known before there are data."""


@dataclass(frozen=True)
class Holdings:
    """What a worker holds between steps."""

    num_parameters: int
    """Of the whole model."""
    local_bytes: int
    """Of the trained parameters that this worker holds, in fp32: what it exchanges."""
    memory: Ledger
    gathered_bytes: int
    """Weights that are whole within a step only (zero2, zero3)."""
    saved_bytes: int
    """Of a checkpoint, of all workers together, with as much in flight as there ever is."""
    round_steps: int
    """τ."""

    @property
    def device_bytes(self) -> int:
        """Where the worker trains."""
        return sum(asdict(self.memory).values()) - self.memory.host_bytes + self.gathered_bytes


def holdings(task: Task, config: Config, workers: int) -> Holdings:
    """What each of so many workers holds between steps. The process must have no process group.

    Args:
        task: of the run; set up, unless it is `Planned` with public data.
    Raises:
        ConfigError: the method is not the suite's own, or cannot train this model.
    """
    hint = "is somebody else's implementation, whose memory is not known before it runs"
    require(config.method in METHODS, "method", config.method, hint)
    # In the host's memory it would hold real tensors.
    comm = replace(config.comm, device=CommDevice.auto)
    method = METHODS[config.method](config.method_config, comm)
    size, strategy = config.mesh.replica_size, config.mesh.strategy
    with torch.device("meta"):
        module = task.model()
    whole, numel = _bytes(module), sum(param.numel() for param in module.parameters())
    with _fake_workers(workers):
        mesh = Mesh.world(size, "meta")
        if strategy is Strategy.ep:
            group = mesh.new_group_within_replica()
            for part in list(module.modules()):
                if isinstance(part, Divisible):
                    assert group is not None, "replica.check refuses a replica of one worker"
                    part.divide(group)
        optimizer = task.optimizer(module)
        # DDP, which carries gradients for such a method, cannot be made of meta tensors.
        placed = Mesh(0, 1, mesh.device) if method.averages_gradients else mesh
        lr, steps = config.optim.lr, config.train.steps
        method.prepare(module, optimizer, placed, lambda step: lr, fresh=False, total_steps=steps)
        method.tell_no_end()
        in_flight = 0
        for step in range(max(_STEPS, method.round_steps)):
            for param in module.parameters():  # later steps are quick without gradients
                trains = param.requires_grad and step < _STEPS
                param.grad = torch.empty_like(param) if trains else None
            method.step()
            sent = (mean.buffer.nbytes for mean in method.means if mean.in_flight)
            in_flight = max(in_flight, sum(sent))
        memory = ledger(module, optimizer, method)
        equal = method.replicated_tensors()
        saved = {name: one.nbytes for name, one in method.saved_tensors().items()}
        once = sum(size for name, size in saved.items() if name in equal)
        average = MovingAverage(module, config.train.ema_decay).nbytes
    share = 1 / size if strategy in CUT else 1.0
    inner = 1 / size if strategy is Strategy.zero1 else share
    extra = round(memory.extra_bytes * share)
    on_host = config.comm.device is CommDevice.cpu
    held = replace(
        memory,
        parameter_bytes=round(memory.parameter_bytes * share),
        gradient_bytes=round(memory.gradient_bytes * share),
        inner_state_bytes=round(memory.inner_state_bytes * inner),
        average_bytes=round(average * share),
        extra_bytes=0 if on_host else extra,
        scratch_bytes=0 if on_host else memory.scratch_bytes,
        host_bytes=extra + memory.scratch_bytes if on_host else 0,
    )
    # The root is whole all the time, in fp32. Under zero3 the next block is fetched while one
    # computes.
    root = whole - sum(map(_bytes, blocks(module)))
    inside = [_gathered(block, config.train.precision) for block in blocks(module)]
    within_a_step = {
        Strategy.zero2: root + sum(inside),
        Strategy.zero3: root + 2 * max(inside, default=0),
    }
    # The workers of a replica save weights and inner state together; replicas what is equal on all.
    replicas = workers // size
    weights = whole * (1 if method.equal_weights else replicas)
    inner_state = memory.inner_state_bytes * whole / memory.parameter_bytes
    inner_state *= 1 if method.averages_gradients else replicas
    averages = average * (size if method.equal_weights else workers)
    own = (sum(saved.values()) - once) * workers + (once + in_flight) * size + averages
    return Holdings(
        num_parameters=numel,
        local_bytes=round(method.copy_bytes * share),
        memory=held,
        gathered_bytes=within_a_step.get(strategy, 0),
        saved_bytes=round(weights + inner_state + own * share + memory.buffer_bytes * workers),
        round_steps=method.round_steps,
    )


@dataclass(frozen=True)
class Work:
    """What one micro-batch of a worker takes."""

    flops: int
    """Floating-point operations of the forward and the backward pass, a multiplication and an
    addition apart, without what is computed again (train.checkpoint_activations)."""
    again_flops: int
    """Those that are computed again."""
    beyond_bytes: int
    """Most that there is at once beyond what is held between steps: activations, and whatever else
    operations make."""
    launches: int
    """Kernels at least: products, convolutions and attention, and without torch.compile, which
    joins the others to these, every operator that is no view and allocates nothing."""


def work(task: Task, config: Config, workers: int, averages: bool) -> Work:
    """What one micro-batch takes.

    Args:
        task: `Planned`; set up, unless its data are public.
        workers: of the run.
        averages: whether the method averages gradients (`Method.averages_gradients`).
    Raises:
        Unknown: its tensors have the sizes that its data tell.
    """
    by_ddp = workers > 1 and (averages or config.mesh.replica_size > 1)
    held = config.train.accumulate > 1 or by_ddp  # DDP's buckets hold them from the start
    found = _micro_batch(task, config, held, config.train.checkpoint_activations)
    if not config.train.checkpoint_activations:
        return found
    once = flops(task, config)
    return replace(found, flops=once, again_flops=found.flops - once)


def flops(task: Task, config: Config) -> int:
    """Floating-point operations of a micro-batch. Raises `ConfigError` as `work` does."""
    return _micro_batch(task, config, held=False, checkpoints=False).flops


def _micro_batch(task: Task, config: Config, held: bool, checkpoints: bool) -> Work:
    """Forward and backward pass. Gradients exist from the start if `held`, otherwise from the
    backward pass on. Where weights are sharded, a whole gradient is freed at once."""
    if not isinstance(task, Planned):
        hint = "its task does not say how large a micro-batch is (co2/task.py, Planned)"
        raise ConfigError("task", config.task, hint)
    module, fake = _fake(task)
    if checkpoints:
        checkpoint_activations(module)
    with fake, Attention(), Live(module) as live:
        trained = [param for param in module.parameters() if param.requires_grad]
        for param in trained:
            if config.mesh.strategy in CUT:
                param.register_post_accumulate_grad_hook(_drop)
            elif held:
                param.grad = torch.empty_like(param)
        batch = task.blank()
        try:
            bf16 = config.train.precision is Precision.bf16
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16), _eagerly(config):
                loss = task.loss(module, batch)
            loss.backward()
        except (DataDependentOutputException, DynamicOutputShapeException):
            hint = "the sizes of its tensors depend on its data, so it cannot be planned"
            raise Unknown("task", config.task, hint) from None
    between = 0 if config.mesh.strategy in CUT else sum(param.nbytes for param in trained)
    launches = live.products if config.train.compile else live.operators
    return Work(live.flops, 0, max(0, live.peak - between), launches)


def _eagerly(config: Config) -> contextlib.AbstractContextManager[object]:
    """Inside, nothing is compiled: fake tensors have nothing to run."""
    compiles = config.train.compile  # else the compiler, which takes seconds, is not imported
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


class Live(TorchDispatchMode):
    """Bytes of the storages that operations make, as long as anything holds them, without those of
    the module; floating-point operations, by PyTorch's own formulas; and operators.

    It does what FlopCounterMode does but for its table of modules, whose hooks hold activations.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch.utils.flop_counter import flop_registry  # costs half a second

        super().__init__()
        self._formulas = flop_registry
        self.now = self.peak = self.flops = self.products = self.operators = 0
        own = (*module.parameters(), *module.buffers())
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in own)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        self.operators += computes(func)
        if formula is not None:
            self.products += 1
            self.flops += formula(*args, **(kwargs or {}), out_val=made)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage.nbytes()).atexit = False

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


@cache
def computes(operator: Any) -> bool:
    """Whether an operator is a launch on a GPU: no view, and no allocation."""
    views = any(r.alias_info and not r.alias_info.is_write for r in operator._schema.returns)
    return not views and "empty" not in operator.__name__


class Attention(TorchFunctionMode):
    """Attention by a kernel that keeps no matrix of scores, also where dropout is on: GPUs have one
    that draws the same dropout again, CPUs have none."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _fake(task: Task) -> tuple[nn.Module, FakeTensorMode]:
    """The task's model, of fake tensors on the CPU, in training mode, and the mode in which to
    compute with it. Nothing is drawn. Tied weights stay tied."""
    with torch.device("meta"):
        module = task.model()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}
    with fake:
        for part in module.modules():
            for own in (part._parameters, part._buffers):
                for name, tensor in own.items():
                    if tensor is not None:
                        own[name] = made.setdefault(id(tensor), _like(tensor))  # type: ignore[assignment]
    return module.train(), fake


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


@contextlib.contextmanager
def _fake_workers(workers: int) -> Iterator[None]:
    """Inside, this process is the first of so many, whose collectives do nothing."""
    if workers == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _gathered(block: nn.Module, precision: Precision) -> int:
    """Bytes of a block's weights as a GPU gathers them."""
    halved = gathered_as(block, precision, torch.device("cuda")).param_dtype is torch.bfloat16
    return _bytes(block) // 2 if halved else _bytes(block)


def _drop(param: Tensor) -> None:
    param.grad = None


def _bytes(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())
