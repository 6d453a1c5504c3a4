"""The training batches of a worker, as pure functions of their numbers."""

from dataclasses import dataclass

import numpy as np

from tasks.graph.sampling import Neighbourhood, Topology
from tasks.shared.randomness import generator
from tasks.shared.sampling import Sampler


@dataclass(frozen=True)
class Batches:
    """Which nodes a worker trains on, and what it sees of their neighbourhoods."""

    nodes: np.ndarray
    """int64: all nodes that are trained on."""
    sampler: Sampler
    """Of places in `nodes`."""
    worker: int
    topology: Topology
    fanout: tuple[int, ...]
    seed: int

    def targets(self, draw: int) -> np.ndarray:
        """The nodes of a batch, int64 [batch size]."""
        return self.nodes[self.sampler.indices(draw, self.worker)]

    def neighbourhood(self, draw: int) -> Neighbourhood:
        """What the model sees of a batch."""
        return self.seen(draw, self.topology)

    def seen(self, draw: int, topology: Topology) -> Neighbourhood:
        """What it would see of a batch with another topology."""
        random = generator(self.seed, draw, self.worker)
        return topology.neighbourhood(self.targets(draw), self.fanout, random)
