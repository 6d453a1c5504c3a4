"""The synchronization methods: one file for each published algorithm, and their registry."""

from co2.methods.acco import ACCO
from co2.methods.allreduce import AllReduce
from co2.methods.base import Method
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

METHODS: dict[str, type[Method]] = {
    "allreduce": AllReduce,
    "local_sgd": LocalSGD,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "noloco": NoLoCo,
    "overlap_local_sgd": OverlapLocalSGD,
    "cocod_sgd": CoCoDSGD,
    "streaming_diloco": StreamingDiLoCo,
    "eager_diloco": EagerDiLoCo,
    "sparseloco": SparseLoCo,
    "co2": CO2,
    "co2_keep": CO2Keep,
    "co2_released": CO2Released,
    "acco": ACCO,
    "sparta": SPARTA,
    "desloc": DESLOC,
    "mt_dao": MTDAO,
    "demo": DeMo,
    "onebit_adam": OneBitAdam,
    "zero_one_adam": ZeroOneAdam,
}
