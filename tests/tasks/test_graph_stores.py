"""Every store gives the batches of the store memory, bit for bit, and reads what it says."""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from co2.comm.mesh import Mesh
from co2.config import OptimConfig
from co2.errors import ConfigError
from tasks.graph import direct, packing, plan
from tasks.graph.ahead import ahead
from tasks.graph.direct import PAGE, DirectFile, Readers, read_rows
from tasks.graph.folder import GraphFolder
from tasks.graph.graph import Graph
from tasks.graph.stores import StoreName
from tests.tasks import build, random_graph
from tests.tasks.build import built, refusal

NODES, ROW = 300, 24
KIB = 1 / 1024
BATCH = 10
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFolder:
    return random_graph.write(tmp_path_factory.mktemp("graph") / "small", NODES)


@pytest.fixture
def make(graph: GraphFolder, tmp_path: Path) -> Callable[..., Graph]:
    """A task on the small graph, whose plans are in a folder of this test."""

    def made(store: str = "memory", steps: int = 20, seed: int = 0, **config: Any) -> Graph:
        given = {"plan": 7, "segment": 3, "host_mb": 2 * KIB, "hidden": 8, "fanout": [3, 4]}
        return built(
            "graph",
            tmp_path,
            graph.folder,
            num_workers=2,
            seed=seed,
            batch_size=BATCH,
            steps=steps,
            optim=OptimConfig(lr=1e-2),
            store=StoreName(store),
            **{**given, **config},
        )

    return made


def mesh(worker: int = 0) -> Mesh:
    return build.mesh(worker, 2)


def drawn(task: Graph, number: int, start: int = 0, worker: int = 0) -> list[Batch]:
    return build.drawn(task, number, start, mesh(worker))


def features(batch: Batch) -> torch.Tensor:
    """With those of the device's cache."""
    if "table" not in batch:
        return batch["features"]
    whole = torch.empty(len(batch["at"]) + len(batch["others"]), batch["features"].shape[1])
    whole[batch["others"]] = batch["features"]
    whole[batch["at"]] = batch["table"][batch["rows"]]
    return whole


def nodes(task: Graph, batch: Batch) -> list[int]:
    """Rows of features name their nodes."""
    whole = torch.from_numpy(np.array(task.graph.features()))
    return [int((whole == row).all(1).nonzero()[0, 0]) for row in features(batch)]


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    names = ["labels", "starts0", "sources0", "starts1", "sources1"]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(features(one), features(other))
        assert all(torch.equal(one[name], other[name]) for name in names)


STORES: dict[str, dict[str, Any]] = {
    "mmap": {},
    "ginex": {},
    "diskgnn": {},
    "diskgnn with the device's cache": {"device_mb": 1 * KIB},
    "diskgnn with the device's alone": {"device_mb": 1.0, "host_mb": 0.0},
    "diskgnn with a tight disk": {"blow_up": 2.2},
    "diskgnn with one batch a segment": {"segment": 1, "blow_up": 50.0},
    "diskgnn without a thread": {"ahead": 0, "threads": 1},
}


@pytest.mark.parametrize("kind", STORES)
def test_the_same_batches(make: Callable[..., Graph], kind: str) -> None:
    """Over several plans, and beyond the last step."""
    task = make(kind.split()[0], **STORES[kind])
    for worker in (0, 1):
        assert_same(drawn(task, 24, worker=worker), drawn(make(), 24, worker=worker))
    model = task.model()
    assert task.evaluate(model) == make().evaluate(model)


@pytest.mark.parametrize("store", ["memory", "mmap", "ginex", "partition", "diskgnn"])
@pytest.mark.parametrize("start", [7, 22])
def test_resume(make: Callable[..., Graph], store: str, start: int) -> None:
    assert_same(drawn(make(store), 24 - start, start), drawn(make(store), 24)[start:])


@pytest.mark.parametrize("store", ["memory", "partition", "diskgnn"])
def test_workers_come_and_go(make: Callable[..., Graph], store: str) -> None:
    """An epoch goes on where it was with another number of workers."""
    task = make(store)
    before = [batch for worker in (0, 1) for batch in drawn(task, 3, worker=worker)]
    alone = Mesh(0, 1, torch.device("cpu"), stretches=((0, 2), (3, 1)))
    train = task.graph.part("train")
    left = (len(train) - 6 * BATCH) // BATCH
    after = build.drawn(task, left, 3, alone)
    seen = [node for batch in before + after for node in nodes(task, batch)[:BATCH]]
    assert len(seen) == (6 + left) * BATCH == len(set(seen)) and set(seen) <= set(train.tolist())


def test_partitions_see_their_own(make: Callable[..., Graph]) -> None:
    """All but a batch's own nodes are in as many parts as memory holds; in an epoch every node is
    trained on at most once."""
    task = make("partition", parts=6, host_mb=2.4 * KIB, steps=9)  # two parts of 1200 bytes
    seen: list[int] = []
    for batch in drawn(task, 9):
        rows = nodes(task, batch)
        seen += rows[:BATCH]
        assert len({node * 6 // NODES for node in rows[BATCH:]}) <= 2
    per_epoch = len(task.graph.part("train")) // (2 * BATCH)
    first = seen[: per_epoch * BATCH]
    assert len(first) == len(set(first))


def test_partitions_read_each_part_once_an_epoch(make: Callable[..., Graph]) -> None:
    task = make("partition", parts=6, host_mb=2.4 * KIB, ahead=0)
    per_epoch = len(task.graph.part("train")) // (2 * BATCH)
    drawn(task, per_epoch)
    outside = BATCH * ROW * 3  # batches on the border of two groups
    assert NODES * ROW <= task.read().needed_bytes <= NODES * ROW + outside


def uncached(task: Graph, number: int, capacity: int) -> int:
    """Rows that the best cache of so many rows has to read for the first batches of a plan: a
    cache that is told the future, written as plainly as can be."""
    sampled = [set(nodes(task, batch)) for batch in drawn(task, number)]
    cache: set[int] = set()
    missed = 0
    for now, needed in enumerate(sampled):
        missed += len(needed - cache)
        again = {
            node: next((later for later in range(now + 1, number) if node in sampled[later]), None)
            for node in cache | needed
        }
        soonest = sorted((use, node) for node, use in again.items() if use is not None)
        cache = {node for _, node in soonest[:capacity]}
    return missed


def test_ginex_is_the_best_cache(make: Callable[..., Graph]) -> None:
    """It reads as many rows as Belady's rule does. (Among nodes that are needed next by the same
    batch any may be kept, which changes nothing of how many are read.)"""
    task = make("ginex", steps=7)
    drawn(task, 7)
    assert task.read().needed_bytes == uncached(make(), 7, int(2048 // ROW)) * ROW


@pytest.mark.parametrize("blow_up", [2.2, 50.0])
def test_disk_is_within_its_limit(make: Callable[..., Graph], blow_up: float) -> None:
    """The more disk is allowed, the more rows are a batch's own, and the less is read in vain. A
    part of the file takes whole pages, which matters at this size alone."""
    task = make("diskgnn", blow_up=blow_up, segment=7, steps=7)
    drawn(task, 7)
    (folder,) = plans(task)
    regions = plan.json.loads((folder / "plan.json").read_text())["regions"]
    assert sum(rows for _, rows in regions) <= blow_up * NODES
    size = (folder / "packed.bin").stat().st_size
    assert size <= blow_up * NODES * ROW + PAGE * len(regions)


def plans(task: Graph) -> list[Path]:
    return list((Path(task.data.root) / "graphs" / "plans").glob("*"))


def test_too_little_disk_or_memory(
    make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and nothing half is left."""

    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    line = refusal(lambda: make("partition", parts=2, host_mb=0.001))
    assert line.startswith("graph.host_mb=0.001: one of graph.parts=2 needs")
    line = refusal(lambda: drawn(make("diskgnn", blow_up=0.1), 1))
    assert line.startswith("graph.blow_up=0.1: the batches of a plan need ")
    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refusal(lambda: drawn(make("diskgnn"), 1))
    assert "No space left on device; make room, or plan fewer" in line
    assert not plans(make())


def test_packing_in_several_passes(
    make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for some rows and pieces of a few pages the file is the same."""
    once, often = make("diskgnn", steps=7), make("diskgnn", steps=7)
    drawn(once, 7)
    (folder,) = plans(once)
    expected = (folder / "packed.bin").read_bytes()
    shutil.rmtree(folder)
    monkeypatch.setattr(packing, "_PASS_ROW_BYTES", 1 << 24)
    monkeypatch.setattr(packing, "_PIECE", 5000)
    drawn(often, 7)
    assert (folder / "packed.bin").read_bytes() == expected


TEARS: dict[str, Callable[[Path], object]] = {
    "a truncated file": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a page of zeros": lambda path: write_at(path, 0, bytes(PAGE)),
    "another byte": lambda path: write_at(path, 10, b"\x55\xaa\x01"),
    "no file": Path.unlink,
}


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("name", ["packed.bin", "packed.bin.sums"])
@pytest.mark.parametrize("tear", TEARS)
def test_torn_plans_are_made_again(make: Callable[..., Graph], name: str, tear: str) -> None:
    expected = drawn(make("diskgnn", steps=7), 7)
    (folder,) = plans(make())
    TEARS[tear](folder / name)
    assert_same(drawn(make("diskgnn", steps=7), 7), expected)
    made = (folder / "plan.json").stat().st_mtime_ns
    assert_same(drawn(make("diskgnn", hidden=16, steps=7), 7), expected)  # of another run, too
    assert (folder / "plan.json").stat().st_mtime_ns == made


def test_torn_amid_a_run(make: Callable[..., Graph]) -> None:
    """What is damaged while it is in use is found, too, and training goes on with the batch it had
    come to."""
    task = make("diskgnn", ahead=0)
    expected = drawn(make(), 7)
    batches = task.batches(mesh(), 0)
    found = list(islice(batches, 2))
    (folder,) = plans(task)
    size = (folder / "packed.bin").stat().st_size
    write_at(folder / "packed.bin", 0, bytes(size))
    found += islice(batches, 5)
    batches.close()
    assert_same(found, expected)


def size(folder: Path) -> int:
    """Bytes of a plan; 0 where a thread removes it as this one looks."""
    with contextlib.suppress(FileNotFoundError):
        return plan._bytes(folder)
    return 0


def test_old_plans_make_room(make: Callable[..., Graph]) -> None:
    """Beside those in use as much stays as the workers' limits allow, the newest; a plan in use is
    never removed."""
    task = make("diskgnn", steps=70, blow_up=3.0)
    limit = 2 * 3 * NODES * ROW
    held = task.batches(mesh(1), 0)
    next(held)
    (used,) = plans(task)
    largest = 0
    for number, _ in enumerate(islice(task.batches(mesh(), 0), 70)):
        if number % 7 == 6:
            largest = max(largest, *map(size, plans(task)))
    assert used.exists() and len(plans(task)) < 11
    kept = sum(map(size, plans(task)))
    assert kept <= limit + largest * 2
    held.close()


@pytest.mark.parametrize("store", ["ginex", "partition", "diskgnn"])
def test_features_that_shrink(tmp_path: Path, store: str) -> None:
    """One line with the file, and how to look through the graph."""
    path = random_graph.write(tmp_path / "mine").folder
    given = {"batch_size": BATCH, "steps": 20, "store": StoreName(store)}
    task = built("graph", tmp_path, path, num_workers=2, **given)
    os.truncate(path / "features.bin", NODES * ROW - 1)
    line = refusal(lambda: drawn(task, 10))
    assert "features.bin: cannot be read: has 7199 bytes, not 7200" in line
    assert line.endswith(f"python -m tasks.prepare graph --check {path}")


def test_rows_of_a_file(tmp_path: Path) -> None:
    """Of all row sizes and places, also at the end of the file and over the borders of pages."""
    random = np.random.default_rng(0)
    for width in (1, 24, 100, 4096, 5000):
        data = random.integers(0, 256, (700, width), dtype=np.uint8)
        (tmp_path / "rows").write_bytes(data.tobytes())
        file = DirectFile(tmp_path / "rows", Readers(3))
        for number in (0, 1, 5, 300, 700):
            chosen = np.sort(random.permutation(700)[:number])
            assert np.array_equal(read_rows(file, chosen, width), data[chosen])
        assert file.bytes_read > 0
        file.close()
    (tmp_path / "rows").write_bytes(bytes(3 * PAGE) + data.tobytes())  # amid a file
    file = DirectFile(tmp_path / "rows", Readers(2))
    assert np.array_equal(read_rows(file, chosen[:9], width, 3), data[chosen[:9]])
    file.close()


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows none is read through the page cache."""
    (tmp_path / "rows").write_bytes(bytes(range(256)) * 64)
    opened = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags)

    monkeypatch.setattr(direct.os, "open", refuse)
    file = DirectFile(tmp_path / "rows", Readers(2))
    assert not file.direct
    assert read_rows(file, np.array([5]), 256).tolist() == [list(range(256))]


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_closing_closes_what_makes(depth: int) -> None:
    """Items come in their order, and so does an error; the thread that makes them ends with
    them."""
    closed, before = threading.Event(), set(threading.enumerate())

    def numbers(last: int | None) -> Iterator[int]:
        try:
            yield from range(last) if last is not None else count()
            raise ConfigError("key", "value", "hint")
        finally:
            closed.set()

    made = numbers(None)
    found = ahead(made, depth)
    assert list(islice(found, 100)) == list(range(100))
    found.close()
    assert closed.is_set()
    found = ahead(numbers(3), depth)
    assert list(islice(found, 3)) == [0, 1, 2]
    assert refusal(lambda: next(found)) == "key=value: hint"
    assert set(threading.enumerate()) <= before
