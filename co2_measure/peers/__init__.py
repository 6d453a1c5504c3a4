"""Other people's implementations, measured on equal terms: see docs/networks.md.

The suite cannot promise of them what it promises of its own methods.
"""

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
