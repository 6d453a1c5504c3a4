"""Finds, without a GPU, what a host would wait for on one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_WAITING = {
    _ATEN._local_scalar_dense,  # item, int(…), bool(…)
    _ATEN.equal,
    _ATEN.is_nonzero,
    _ATEN.masked_select,
    _ATEN.nonzero,
    _ATEN.unique_consecutive,
    _ATEN._unique2,
}
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_}


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        waits = packet in _WAITING
        if packet is _ATEN.repeat_interleave:
            waits = kwargs.get("output_size") is None
        if packet in _INDEXING:
            waits = any(part is not None and part.dtype == torch.bool for part in args[1])
        assert not waits, f"the host would wait for {func}"
        return func(*args, **kwargs)


class _Lists(TorchFunctionMode):
    """A CPU's tensor becomes a list without any operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in (Tensor.tolist, Tensor.numpy), f"the host would wait for {func}"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, what fails is all whose value, or shape, the host would have to wait for."""
    with _Lists(), _Operators():
        yield
