"""Other people's implementations, measured on equal terms: see docs/peers.md.

The suite cannot promise of them what it promises of its own methods.
"""

from importlib.util import find_spec

from co2.config import Config, Precision
from co2.errors import require
from co2.methods import METHODS, Method
from co2_measure.peers.base import Peer
from co2_measure.peers.fairscale_slowmo import FairscaleSlowMo
from co2_measure.peers.torch_post_local_sgd import TorchPostLocalSGD
from co2_measure.peers.torchft_diloco import TorchftDiLoCo

PEERS: dict[str, type[Peer]] = {
    "torch_post_local_sgd": TorchPostLocalSGD,
    "torchft_diloco": TorchftDiLoCo,
    "fairscale_slowmo": FairscaleSlowMo,
}


def known_methods() -> dict[str, type[Method]]:
    """Everything that `method=` takes, by name: the suite's own methods, then the peers."""
    return {**METHODS, **PEERS}


def make_method(config: Config) -> Method:
    """The method of a run. Raises `ConfigError` where it cannot be combined with `comm`."""
    return known_methods()[config.method](config.method_config, config.comm)


def check(config: Config, world: int, device: str) -> None:
    """Raise `ConfigError` for what a peer cannot run, before anything is started. Other methods
    pass.

    Args:
        world: number of the run's workers.
        device: the kind of device that they train on, "cpu" or "cuda".
    """
    name = config.method
    if name not in PEERS:
        return
    check_installed(name)
    require(world > 1, "launch.workers", world, f"method={name} needs 2 or more")
    size = config.mesh.replica_size
    require(size == 1, "mesh.replica_size", size, f"method={name} takes a worker for a replica")
    wire = config.comm.dtype
    require(wire is Precision.fp32, "comm.dtype", wire.value, f"method={name} sends fp32 only")
    hint = f"method={name} is measured over gloo only; use launch.backend=gloo"
    require(device != "cuda", "launch.backend", config.launch.backend, hint)


def check_installed(name: str) -> None:
    """Raise `ConfigError` unless the package that a peer comes from is installed."""
    package = PEERS[name].package
    hint = "needs the extra 'peers': pip install -e '.[peers]'"
    require(find_spec(package) is not None, "method", name, hint)
