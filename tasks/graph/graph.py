"""Node classification in a graph whose features may be larger than memory.

What a batch is: tasks/graph/sampling.py; the models: tasks/graph/networks.py; where features come
from: tasks/graph/stores.py.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import ConfigError, require
from co2.limits import Amount, Count, Decay, Limited, Range
from co2.program import python
from co2.streams import BatchCopies
from co2.task import Batch, Published, ReadTotals
from tasks.graph import calls, ginex
from tasks.graph.ahead import ahead
from tasks.graph.batches import Batches
from tasks.graph.direct import Readers
from tasks.graph.diskgnn import DiskGNN
from tasks.graph.folder import GraphFolder, open_graph
from tasks.graph.networks import Edges, GraphNetwork, Network
from tasks.graph.packing import LONGEST_SEGMENT, Layout
from tasks.graph.partition import GroupedSampler, Partition, Parts
from tasks.graph.plan import Finish
from tasks.graph.planned import Plans
from tasks.graph.public import DISK_BYTES, KNOWN
from tasks.graph.sampling import Topology
from tasks.graph.stores import (
    ArrayRows,
    DiskRows,
    Loaded,
    MappedRows,
    Rows,
    Store,
    StoreName,
    Whole,
)
from tasks.shared.evaluation import evaluating, total
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import UNKNOWN
from tasks.shared.randomness import generator, seeded
from tasks.shared.sampling import Sampler, Stretches, evaluated, validation_samples

# A name with a hyphen cannot be a class attribute.
DatasetName = Enum(
    "DatasetName",
    {
        "calls": "calls",
        "generated": "generated",
        "papers100m": "papers100m",
        "mag240m": "mag240m",
        "friendster": "friendster",
        "igb-tiny": "igb-tiny",
        "igb-small": "igb-small",
        "igb-medium": "igb-medium",
        "igb-large": "igb-large",
        "igb-full": "igb-full",
    },
)
Begun = Generator[Callable[[], Batch], None, None]
"""Batches on their way to the device, as `BatchCopies.begin` returns them."""

_MIB = 1 << 20
_EVAL_BATCH = 256


class Graph:
    """The task `graph`."""

    @dataclass
    class Config(Limited):
        dataset: DatasetName = DatasetName["calls"]
        """calls: functions of sympy. generated: of any size. Others: see tasks.prepare."""
        model: Network = Network.sage
        """GraphSAGE or GAT."""
        hidden: Count = 128
        """Width of the hidden layers; of all heads together for gat."""
        heads: Count = 4
        """Attention heads of gat."""
        fanout: list[Count] = field(default_factory=lambda: [10, 10])
        """Most neighbours of a node in each layer, that next to the features first."""
        dropout: Decay = 0.3
        """Rate of dropout between the layers."""
        eval_samples: Count | None = None
        """Validation nodes of one evaluation; null takes all."""
        store: StoreName = StoreName.memory
        """Where features come from: tasks/graph/stores.py."""
        host_mb: Amount = 64.0
        """MiB of features that a worker keeps in memory (ginex, partition, diskgnn)."""
        device_mb: Amount = 0.0
        """MiB of features that it keeps where it trains (diskgnn)."""
        plan: Count = 256
        """Batches that a worker samples at once ahead of training (ginex, diskgnn)."""
        segment: Annotated[int, Range(1, LONGEST_SEGMENT)] = 8
        """Batches that share rows on disk (diskgnn)."""
        blow_up: Amount = 4.0
        """Most bytes of a worker's packed features on disk, over those of all features
        (diskgnn)."""
        parts: Count = 16
        """Parts of the graph, of which as many as host_mb holds are there at once (partition)."""
        ahead: Annotated[int, Range(0, unit="batches")] = 2
        """Batches that are loaded ahead of their use, on the device that trains."""
        threads: Count = 8
        """That read from disk at the same time."""

        def __post_init__(self) -> None:
            super().__post_init__()
            require(bool(self.fanout), "fanout", self.fanout, "must have a number for each layer")
            hint = f"must divide hidden={self.hidden}"
            divided = self.model is not Network.gat or self.hidden % self.heads == 0
            require(divided, "heads", self.heads, hint)

    version = 1
    pace = UNKNOWN
    unit = "samples"
    units_per_sample = 1

    def __init__(
        self, config: Config, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        self.config, self.train, self.optim, self.data = config, train, optim, data
        self._graph: GraphFolder | None = None
        self._validation = np.empty(0, np.int64)  # the nodes that an evaluation takes
        self._store: Store | None = None

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`."""
        hint = "task=graph loads in threads (graph.ahead, graph.threads); use 0"
        require(self.data.workers == 0, "data.workers", self.data.workers, hint)
        store = self.config.store
        known = sys.platform == "linux" or store is StoreName.memory
        require(known, "graph.store", store.value, "needs Linux's direct I/O; use memory")
        self._graph = graph = self._open()
        self._sampler(num_workers)
        held = graph.part("val")
        chosen = validation_samples(len(held), self.config.eval_samples, self.data.validation)
        self._validation = held[chosen]
        if store is StoreName.partition:
            self._parts()

    def model(self) -> nn.Module:
        """See `Task.model`. A public graph need not be there to count parameters."""
        config, facts = self.config, self._facts
        hidden = [config.hidden] * (len(config.fanout) - 1)
        widths = [facts["features"], *hidden, facts["classes"]]
        with seeded(self.train.seed):
            return GraphNetwork(config.model, widths, config.heads, config.dropout)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """See `Task.optimizer`. With Muon, AdamW updates the last layer."""
        last = f"layers.{len(self.config.fanout) - 1}."
        ends = {name for name, _ in model.named_parameters() if name.startswith(last)}
        return make_optimizer(model, self.optim, ends=ends)

    def batches(self, mesh: Mesh, start: int) -> Iterator[Batch]:
        """See `Task.batches`. A batch has features [nodes, features], labels int64 [batch size],
        and for layer n edges, "starts<n>" and "sources<n>" (tasks/graph/sampling.py)."""
        try:
            self._store = store = self._made(mesh)
            left = max(0, self._total - start)
            copies = BatchCopies(mesh.device)
            # No plan is made for batches beyond the training's end, unless they are asked for.
            yield from _taken(ahead(self._begun(store, copies, start, left), self.config.ahead))
            yield from _taken(self._begun(store, copies, start + left, None))
        except OSError as error:
            hint = f"cannot be read: {error.strerror}; {python()} -m tasks.prepare graph --check"
            raise ConfigError("graph", error.filename, f"{hint} {self.graph.folder}") from None

    def _begun(self, store: Store, copies: BatchCopies, start: int, number: int | None) -> Begun:
        """So many batches, on their way to the device; None: endless ones."""
        with closing(store.stream(start)) as stream:
            for loaded in islice(stream, number):
                yield copies.begin(self._batch(loaded))

    def blank(self) -> Batch:
        """See `Planned`: no node has fewer neighbours than are sampled, and none is met twice."""
        known = self._graph
        kind = torch.float16 if self.config.dataset is DatasetName["mag240m"] else torch.float32
        if known is not None:
            kind = torch.from_numpy(np.empty(0, known.dtype)).dtype
        nodes, layers = self.train.batch_size, []
        for fanout in reversed(self.config.fanout):
            layers.append((nodes + 1, nodes * fanout))
            nodes = min(nodes * (1 + fanout), self._facts["nodes"])
        batch = {
            "features": torch.zeros(nodes, self._facts["features"], dtype=kind),
            "labels": torch.zeros(self.train.batch_size, dtype=torch.int64),
        }
        for number, (starts, sources) in enumerate(reversed(layers)):
            batch[f"starts{number}"] = torch.zeros(starts, dtype=torch.int64)
            batch[f"sources{number}"] = torch.zeros(sources, dtype=torch.int64)
        return batch

    def published(self) -> Published | None:
        """See `Planned`."""
        name = self.config.dataset.value
        if self.data.path is not None or name not in DISK_BYTES:
            return None
        return Published(KNOWN[name]["train"], DISK_BYTES[name])

    @property
    def _facts(self) -> Mapping[str, int]:
        """Nodes, features and classes: those of the graph, or what is known of it."""
        if self._graph is None and self.published() is not None:
            return KNOWN[self.config.dataset.value]
        return {key: int(self.graph.meta[key]) for key in ("nodes", "features", "classes")}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats, fp32."""
        assert isinstance(batch, dict)
        return F.cross_entropy(self._logits(model, batch).float(), batch["labels"])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task.evaluate`. "loss" is in nats, "accuracy" from 0 to 1. Neighbours are sampled,
        the same ones for every seed."""
        device, chosen = next(model.parameters()).device, self._validation
        num_batches = -(-len(chosen) // _EVAL_BATCH)
        rows, copies = self._rows(ReadTotals()), BatchCopies(device)

        def compute(number: int) -> Tensor:
            nodes = chosen[number * _EVAL_BATCH : (number + 1) * _EVAL_BATCH]
            fanout = tuple(self.config.fanout)
            whole = self._topology.neighbourhood(nodes, fanout, generator(number))
            batch = copies.begin(self._batch(Loaded(whole, rows.read(whole.nodes))))()
            logits, labels = self._logits(model, batch).float(), batch["labels"]
            losses = F.cross_entropy(logits, labels, reduction="none")
            right = logits.argmax(1) == labels
            return torch.stack([losses.double().sum(), right.double().sum()])

        with evaluating(model):
            loss, right = total(compute, num_batches)
        return {"loss": loss / len(chosen), "accuracy": right / len(chosen)}

    def baselines(self) -> dict[str, float]:
        """See `Task.baselines`. "majority_accuracy" is that of always predicting the most frequent
        class."""
        counts = np.bincount(self.graph.labels()[self._validation])
        return {"majority_accuracy": float(counts.max() / counts.sum())}

    def fingerprint(self) -> dict[str, object]:
        """See `Task.fingerprint`."""
        graph = self.graph
        return {
            "data": graph.meta["name"],
            "sha256": self._sha256,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
            "num_samples": graph.meta["parts"],
            "num_classes": graph.num_classes,
            "evaluated": evaluated(self.data.validation, self._validation),
        }

    def read(self) -> ReadTotals:
        """See `Reading`."""
        return ReadTotals() if self._store is None else self._store.totals

    @property
    def graph(self) -> GraphFolder:
        """The graph, after `setup`."""
        assert self._graph is not None, "call setup() first"
        return self._graph

    def _open(self) -> GraphFolder:
        root, name = Path(self.data.root), self.config.dataset.value
        if self.data.path is not None:
            own = open_graph(Path(self.data.path))
            hint = (
                "is no sound graph: graph.json or a file beside it is missing or of another size; "
            )
            hint += "docs/data.md has the layout"
            if own is None:
                raise ConfigError("data.path", self.data.path, hint)
            return own
        if name == "calls":
            return calls.prepared(root)
        found = open_graph(root / "graphs" / name)
        if found is None:
            command = f"{python()} -m tasks.prepare graph --set {name} --root {root}"
            hint = f"no sound {root / 'graphs' / name}; make it: {command}"
            raise ConfigError("graph.dataset", name, hint)
        return found

    @cached_property
    def _topology(self) -> Topology:
        return Topology(self.graph.starts(), self.graph.neighbours())

    @cached_property
    def _labels(self) -> Tensor:
        return torch.from_numpy(self.graph.labels().astype(np.int64))

    @cached_property
    def _readers(self) -> Readers:
        return Readers(self.config.threads)

    @cached_property
    def _features(self) -> np.ndarray:
        """All features in memory, [nodes, features]."""
        graph = self.graph
        return np.fromfile(graph.features_path, graph.dtype).reshape(graph.num_nodes, -1)

    def _rows(self, totals: ReadTotals) -> Rows:
        """Features of any nodes, by the store's own way to the file."""
        if self.config.store is StoreName.memory:
            return ArrayRows(self._features)
        if self.config.store is StoreName.mmap:
            return MappedRows(self.graph, totals)
        return DiskRows(self.graph, self._readers, totals)

    @property
    def _sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.graph.meta["sha256"]).encode()).hexdigest()

    @property
    def _total(self) -> int:
        """Batches of the whole training, of one worker."""
        return self.train.steps * self.train.accumulate

    def _sampler(self, num_workers: int, stretches: Stretches = ()) -> Sampler:
        nodes, train = self.graph.part("train"), self.train
        found = num_workers, train.batch_size, train.seed, stretches, train.global_batch
        if self.config.store is StoreName.partition:
            return GroupedSampler(self._parts(), nodes, *found)
        return Sampler(len(nodes), *found)

    def _parts(self) -> Parts:
        config, graph = self.config, self.graph
        one = -(-graph.num_nodes // config.parts) * graph.row_bytes
        at_once = min(int(config.host_mb * _MIB) // one, config.parts)
        hint = (
            f"one of graph.parts={config.parts} needs {one / _MIB:.1f}; allow that, or more parts"
        )
        require(at_once >= 1, "graph.host_mb", config.host_mb, hint)
        return Parts(graph.num_nodes, config.parts, at_once, self.train.seed)

    def _made(self, mesh: Mesh) -> Store:
        """The store of a worker."""
        config, graph = self.config, self.graph
        sampler = self._sampler(mesh.num_workers, mesh.stretches)
        nodes, fanout = graph.part("train"), tuple(config.fanout)
        place = sampler, mesh.worker, self._topology, fanout, self.train.seed
        batches = Batches(nodes, *place)
        if config.store is StoreName.partition:
            return Partition(graph, batches, self._parts(), self._readers)
        if config.store in (StoreName.memory, StoreName.mmap):
            totals = ReadTotals()
            return Whole(batches, self._rows(totals), totals)
        host = int(config.host_mb * _MIB)
        if config.store is StoreName.ginex:
            uses = partial(ginex.next_uses, graph.num_nodes)
            plans = self._plans(mesh, batches, {}, uses)
            return ginex.Ginex(graph, plans, host, self._readers)
        on_device, in_memory = (
            int(config.device_mb * _MIB) // graph.row_bytes,
            host // graph.row_bytes,
        )
        sizes = on_device, in_memory, config.segment, config.blow_up
        layout = Layout(graph, *sizes, memory=max(host, 64 * _MIB))
        plans = self._plans(mesh, batches, {"layout": sizes}, layout.pack)
        return DiskGNN(graph, plans, layout, self._readers, mesh.device)

    def _plans(self, mesh: Mesh, batches: Batches, own: dict[str, object], finish: Finish) -> Plans:
        config, graph = self.config, self.graph
        key = {
            "graph": self._sha256,
            "store": config.store.value,
            "seed": self.train.seed,
            "batch_size": self.train.batch_size,
            "global_batch": self.train.global_batch,
            "worker": mesh.worker,
            "workers": mesh.stretches or mesh.num_workers,
            "fanout": config.fanout,
            **own,
        }
        limit = int(mesh.num_workers * config.blow_up * graph.features_bytes)
        folder = Path(self.data.root) / "graphs" / "plans"
        span = config.plan, self._total
        return Plans(folder, key, batches, *span, finish, self._readers, limit)

    def _batch(self, loaded: Loaded) -> dict[str, Tensor]:
        whole, cached = loaded.whole, loaded.cached
        targets = torch.from_numpy(whole.nodes[: whole.num_targets])
        batch = {"features": loaded.features, "labels": self._labels[targets]}
        for number, layer in enumerate(whole.layers):
            batch[f"starts{number}"] = torch.from_numpy(layer.starts)
            batch[f"sources{number}"] = torch.from_numpy(layer.sources)
        if cached is not None:
            # The table is on the device already, so that moving a batch does not move it.
            batch |= {"table": cached.table, "rows": cached.rows, "at": cached.at}
            batch["others"] = cached.others
        return batch

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        features = batch["features"]
        if "table" in batch:
            number = len(batch["at"]) + len(features)
            whole = features.new_empty(number, features.shape[1])
            whole[batch["others"]] = features
            whole[batch["at"]] = batch["table"][batch["rows"]]
            features = whole
        layers = range(len(self.config.fanout))
        edges: list[Edges] = [(batch[f"starts{n}"], batch[f"sources{n}"]) for n in layers]
        logits: Tensor = model(features.float(), edges)
        return logits


def _taken(begun: Begun) -> Iterator[Batch]:
    """Batches as they are needed."""
    with closing(begun):
        for take in begun:
            yield take()
