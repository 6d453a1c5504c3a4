"""A cache in memory that knows when each node is needed again.

After a batch, of the nodes that are cached and of its own the cache keeps those that are needed
soonest (Belady's rule, the best there is). Batches are sampled ahead of training, so that this is
known; what is not cached is read row by row. Idea: Park et al., "Ginex" (VLDB 2022, arXiv
2208.09151).
"""

from collections.abc import Iterator

import numpy as np
import torch

from tasks.graph.direct import Readers
from tasks.graph.folder import GraphFolder
from tasks.graph.plan import Draft, Plan
from tasks.graph.planned import Plans
from tasks.graph.sampling import looked_up
from tasks.graph.stores import Batched, DiskRows, Loaded, empty_rows

NEVER = np.iinfo(np.int32).max


class Ginex:
    """The store ginex.

    Args:
        graph: the graph.
        plans: of the batches, finished by `next_uses`.
        cache_bytes: of features in memory.
        readers: threads that read.
    """

    def __init__(
        self, graph: GraphFolder, plans: Plans, cache_bytes: int, readers: Readers
    ) -> None:
        self.totals, self._plans, self._graph = plans.totals, plans, graph
        self._rows = DiskRows(graph, readers, self.totals)
        self._capacity = min(cache_bytes // graph.row_bytes, graph.num_nodes)

    def stream(self, start: int) -> Batched:
        """See `Store.stream`."""
        return self._plans.stream(self._load, start)

    def _load(self, plan: Plan, numbers: range) -> Iterator[Loaded]:
        table = empty_rows(self._graph, self._capacity)
        # By id: the nodes that are cached, their rows in the table, the batch that needs each next.
        cached, slots, again = (np.empty(0, np.int64) for _ in range(3))
        for number in numbers:
            whole, uses = plan.neighbourhood(number), plan.notes(number)
            held, place = looked_up(whole.nodes, cached)
            features = empty_rows(self._graph, len(whole.nodes))
            at = torch.from_numpy(np.flatnonzero(held))
            features[at] = table[torch.from_numpy(slots[place[held]])]
            missing = np.flatnonzero(~held)
            features[torch.from_numpy(missing)] = self._rows.read(whole.nodes[missing])
            yield Loaded(whole, features)
            # The candidates: the batch's own nodes, and what else is cached.
            rest = np.ones(len(cached), bool)
            rest[place[held]] = False
            slot = np.full(len(whole.nodes), -1)
            slot[held] = slots[place[held]]
            ids, slot = np.append(whole.nodes, cached[rest]), np.append(slot, slots[rest])
            uses = np.append(uses, again[rest])
            keep = _soonest(uses, self._capacity)
            new = keep[slot[keep] < 0]
            free = np.ones(self._capacity, bool)
            free[slot[keep][slot[keep] >= 0]] = False
            slot[new] = np.flatnonzero(free)[: len(new)]
            table[torch.from_numpy(slot[new])] = features[torch.from_numpy(new)]
            keep = keep[np.argsort(ids[keep])]
            cached, slots, again = ids[keep], slot[keep], uses[keep]


def next_uses(num_nodes: int, draft: Draft) -> dict[str, object]:
    """Finish a plan: each note is the number of the batch that needs the node next, or `NEVER`."""
    uses = np.full(num_nodes, NEVER, np.int32)

    def backwards() -> Iterator[np.ndarray]:
        for number in reversed(range(draft.num_batches)):
            nodes = draft.nodes(number)
            yield uses[nodes]
            uses[nodes] = number

    draft.write_notes(backwards(), backwards=True)
    return {}


def _soonest(uses: np.ndarray, most: int) -> np.ndarray:
    """Places of those that are used again, at most so many of them, the soonest: int64."""
    again = np.flatnonzero(uses < NEVER)
    if len(again) > most:
        again = again[np.argpartition(uses[again], most)[:most]]
    return again
