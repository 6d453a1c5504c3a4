"""CO2 and its rivals: ways of synchronizing data-parallel replicas, behind one interface.

sync = co2.CO2(tau=12)
model = sync.prepare(model, optimizer, co2.Mesh.world())
...  loss.backward(); sync.step(); optimizer.zero_grad()

Names are imported when they are first used, so that the simulator, which needs no torch, does not
import it.
"""

from __future__ import annotations  # an old Python must come as far as co2/program.py

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from co2.comm.mesh import Mesh
    from co2.config import CommConfig
    from co2.errors import ConfigError, ReplicasDiffer, WrongCall
    from co2.methods import METHODS, Method
    from co2.methods.acco import ACCO
    from co2.methods.allreduce import AllReduce
    from co2.methods.co2 import CO2
    from co2.methods.co2_keep import CO2Keep
    from co2.methods.co2_released import CO2Released
    from co2.methods.cocod_sgd import CoCoDSGD
    from co2.methods.demo import DeMo
    from co2.methods.desloc import DESLOC
    from co2.methods.diloco import DiLoCo
    from co2.methods.eager_diloco import EagerDiLoCo
    from co2.methods.local_sgd import LocalSGD
    from co2.methods.mt_dao import MTDAO
    from co2.methods.noloco import NoLoCo
    from co2.methods.onebit_adam import OneBitAdam
    from co2.methods.overlap_local_sgd import OverlapLocalSGD
    from co2.methods.slowmo import SlowMo
    from co2.methods.sparseloco import SparseLoCo
    from co2.methods.sparta import SPARTA
    from co2.methods.streaming_diloco import StreamingDiLoCo
    from co2.methods.zero_one_adam import ZeroOneAdam
    from co2.start.notebook import run

__all__ = [
    "ACCO",
    "CO2",
    "DESLOC",
    "METHODS",
    "MTDAO",
    "SPARTA",
    "AllReduce",
    "CO2Keep",
    "CO2Released",
    "CoCoDSGD",
    "CommConfig",
    "ConfigError",
    "DeMo",
    "DiLoCo",
    "EagerDiLoCo",
    "LocalSGD",
    "Mesh",
    "Method",
    "NoLoCo",
    "OneBitAdam",
    "OverlapLocalSGD",
    "ReplicasDiffer",
    "SlowMo",
    "SparseLoCo",
    "StreamingDiLoCo",
    "WrongCall",
    "ZeroOneAdam",
    "run",
]

_ELSEWHERE = {
    "CommConfig": "config",
    "ConfigError": "errors",
    "ReplicasDiffer": "errors",
    "WrongCall": "errors",
    "Mesh": "comm.mesh",
    "run": "start.notebook",
}
"""Where a name lies that is none of `co2.methods`."""
_ROOMS = ("comm", "config", "errors", "methods")
"""What `import co2` alone gives access to, as in `co2.methods.METHODS`."""


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"co2.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'co2' has no attribute '{name}'")
    value = getattr(import_module(f"co2.{_ELSEWHERE.get(name, 'methods')}"), name)
    globals()[name] = value  # the next time it is found without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
