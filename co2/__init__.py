"""CO2 and its rivals: ways of keeping data-parallel replicas in step, behind one interface.

sync = co2.CO2(co2.CO2.Config(tau=12))
model = sync.prepare(model, optimizer, co2.Mesh.world())
...  loss.backward(); sync.step(); optimizer.zero_grad()
"""

from co2.comm.mesh import Mesh
from co2.config import CommConfig
from co2.errors import ConfigError
from co2.methods import METHODS, Method
from co2.methods.allreduce import AllReduce
from co2.methods.co2 import CO2
from co2.methods.co2_keep import CO2Keep
from co2.methods.cocod_sgd import CoCoDSGD
from co2.methods.diloco import DiLoCo
from co2.methods.eager_diloco import EagerDiLoCo
from co2.methods.local_sgd import LocalSGD
from co2.methods.onebit_adam import OneBitAdam
from co2.methods.overlap_local_sgd import OverlapLocalSGD
from co2.methods.slowmo import SlowMo
from co2.methods.streaming_diloco import StreamingDiLoCo
from co2.methods.zero_one_adam import ZeroOneAdam

__all__ = [
    "CO2",
    "METHODS",
    "AllReduce",
    "CO2Keep",
    "CoCoDSGD",
    "CommConfig",
    "ConfigError",
    "DiLoCo",
    "EagerDiLoCo",
    "LocalSGD",
    "Mesh",
    "Method",
    "OneBitAdam",
    "OverlapLocalSGD",
    "SlowMo",
    "StreamingDiLoCo",
    "ZeroOneAdam",
]
