"""Finds, without a GPU, what a host would wait for on one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_WAITING = {
    _ATEN._local_scalar_dense,  # item, tolist, int(…), bool(…)
    _ATEN.equal,
    _ATEN.is_nonzero,
    _ATEN.masked_select,
    _ATEN.nonzero,
    _ATEN.unique_consecutive,
    _ATEN._unique2,
}
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_}


class NoWaits(TorchDispatchMode):
    """Inside, operators fail whose results' shape or value the host would have to wait for."""

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


def no_waits(loss: Callable[[], Tensor]) -> None:
    """A forward and a backward pass for which no host waits."""
    with NoWaits():
        loss().backward()
