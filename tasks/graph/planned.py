"""The plans of a worker, one after the other."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from co2.errors import ConfigError
from co2.task import ReadTotals
from tasks.graph.batches import Batches
from tasks.graph.direct import Readers
from tasks.graph.plan import Finish, Plan, discard, opened
from tasks.graph.stores import Batched, Loaded
from tasks.graph.verified import Torn


class Plans:
    """Plans of `size` batches each, which are made as they are needed.

    Args:
        folder: of all plans of the graph.
        key: everything that plans depend on but the batches' numbers, JSON.
        batches: what is sampled.
        size: batches of a plan.
        total: batches of the whole training, which the last plan ends with.
        finish: what the store adds.
        readers: threads that read.
        limit: bytes of plans that may be on disk beside a new one.
    """

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, Any],
        batches: Batches,
        size: int,
        total: int,
        finish: Finish,
        readers: Readers,
        limit: int,
    ) -> None:
        self._folder, self._key, self._batches, self._size = folder, key, batches, size
        self._finish, self._readers, self._limit = finish, readers, limit
        self._total = total
        self.totals = ReadTotals()

    def stream(self, load: Callable[[Plan, range], Iterator[Loaded]], start: int) -> Batched:
        """Endless batches, from that with number `start` on.

        Args:
            load: loads batches of a plan, by their numbers within it.
        Raises:
            ConfigError: the disk is full, or does not keep what is written.
        """
        draw, torn = start, -1
        while True:
            first = draw - draw % self._size
            end = first + self._size
            draws = range(first, min(end, self._total) if draw < self._total else end)
            plan = self._opened(draws)
            try:
                for loaded in load(plan, range(draw - first, len(draws))):
                    yield loaded
                    draw += 1
            except Torn as error:  # made again; once for a batch
                if torn == draw:
                    hint = f"{error}, as it was before; the disk does not keep what is written"
                    raise ConfigError("data.root", self._folder, hint) from None
                torn = draw
                discard(plan)
            finally:
                plan.close()

    def _opened(self, draws: range) -> Plan:
        began = time.perf_counter()
        key = {**self._key, "draws": [draws.start, draws.stop]}
        found = (self._batches, draws, self._finish, self._readers, self._limit)
        plan = opened(self._folder, key, *found)
        self.totals.planning_s += time.perf_counter() - began
        self.totals.plan_bytes = max(self.totals.plan_bytes, plan.bytes)
        return plan
