"""Every store gives the batches of the store memory, bit for bit, and reads what it says."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from itertools import islice
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
from tasks.graph.networks import Network
from tasks.graph.stores import StoreName
from tasks.graph.verified import Records, RecordsWriter, Torn
from tests.grids import grid
from tests.tasks import random_graph
from tests.tasks.build import built

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

    def build(store: str = "memory", steps: int = 20, seed: int = 0, **config: Any) -> Graph:
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

    return build


def mesh(worker: int = 0, **given: Any) -> Mesh:
    return Mesh(worker, 2, torch.device("cpu"), **given)


def drawn(task: Graph, number: int, start: int = 0, worker: int = 0) -> list[Batch]:
    batches = task.batches(mesh(worker), start)
    found = list(islice(batches, number))
    batches.close()
    return found


def features(batch: Batch) -> torch.Tensor:
    """With those of the device's cache."""
    if "table" not in batch:
        return batch["features"]
    whole = torch.empty(len(batch["at"]) + len(batch["others"]), batch["features"].shape[1])
    whole[batch["others"]] = batch["features"]
    whole[batch["at"]] = batch["table"][batch["rows"]]
    return whole


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    names = ["labels", "starts0", "sources0", "starts1", "sources1"]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(features(one), features(other))
        assert all(torch.equal(one[name], other[name]) for name in names)


STORES: dict[str, dict[str, Any]] = {
    "mmap": {},
    "ginex": {},
    "ginex without a cache": {"host_mb": 0.0},
    "ginex with a large one": {"host_mb": 1.0},
    "diskgnn": {},
    "diskgnn without caches": {"host_mb": 0.0},
    "diskgnn with all cached": {"host_mb": 1.0},
    "diskgnn with the device's cache": {"device_mb": 1 * KIB},
    "diskgnn with the device's alone": {"device_mb": 1.0, "host_mb": 0.0},
    "diskgnn with a tight disk": {"blow_up": 2.2},
    "diskgnn with much disk": {"blow_up": 50.0},
    "diskgnn with one batch a segment": {"segment": 1, "blow_up": 50.0},
    "diskgnn without a thread": {"ahead": 0, "threads": 1},
}


GENEROUS = ("ginex with a large one", "diskgnn with all cached", "diskgnn with much disk")
"""More memory or disk than data as small as this can use."""


@pytest.mark.parametrize("kind", grid(STORES, lambda kind: kind not in GENEROUS))
def test_the_same_batches(make: Callable[..., Graph], kind: str) -> None:
    """Over several plans, and beyond the last step."""
    task = make(kind.split()[0], **STORES[kind])
    for worker in (0, 1):
        assert_same(drawn(task, 24, worker=worker), drawn(make(), 24, worker=worker))


@pytest.mark.parametrize("store", ["memory", "mmap", "ginex", "partition", "diskgnn"])
@pytest.mark.parametrize("start", grid([1, 7, 16, 22], (7, 22).__contains__))
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
    batches = task.batches(alone, 3)
    after = list(islice(batches, left))
    batches.close()
    # Rows of features name their nodes.
    whole = torch.from_numpy(np.array(task.graph.features()))
    seen: list[int] = []
    for batch in before + after:
        rows = features(batch)[:BATCH]
        seen += [int((whole == row).all(1).nonzero()[0, 0]) for row in rows]
    assert len(seen) == (6 + left) * BATCH == len(set(seen)) and set(seen) <= set(train.tolist())


def test_partitions_see_their_own(make: Callable[..., Graph]) -> None:
    """All but a batch's own nodes are in as many parts as memory holds; in an epoch every node is
    trained on at most once."""
    task = make("partition", parts=6, host_mb=2.4 * KIB, steps=9)  # two parts of 1200 bytes
    whole = torch.from_numpy(np.array(task.graph.features()))
    seen: list[int] = []
    for batch in drawn(task, 9):
        rows = [int((whole == row).all(1).nonzero()[0, 0]) for row in features(batch)]
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
    sampled = [task_nodes(task, draw) for draw in range(number)]
    cache: set[int] = set()
    missed = 0
    for now, nodes in enumerate(sampled):
        missed += len(nodes - cache)
        again = {
            node: next((later for later in range(now + 1, number) if node in sampled[later]), None)
            for node in cache | nodes
        }
        soonest = sorted((use, node) for node, use in again.items() if use is not None)
        cache = {node for _, node in soonest[:capacity]}
    return missed


def task_nodes(task: Graph, draw: int) -> set[int]:
    whole = torch.from_numpy(np.array(task.graph.features()))
    (batch,) = drawn(task, 1, draw)
    return {int((whole == row).all(1).nonzero()[0, 0]) for row in features(batch)}


def test_ginex_is_the_best_cache(make: Callable[..., Graph]) -> None:
    """It reads as many rows as Belady's rule does. (Among nodes that are needed next by the same
    batch any may be kept, which changes nothing of how many are read.)"""
    task = make("ginex", steps=7)
    drawn(task, 7)
    assert task.read().needed_bytes == uncached(make(), 7, int(2048 // ROW)) * ROW


@pytest.mark.parametrize("blow_up", [2.2, 3.0, 50.0])
def test_disk_is_within_its_limit(make: Callable[..., Graph], blow_up: float) -> None:
    """The more disk is allowed, the more rows are a batch's own, and the less is read in vain. A
    part of the file takes whole pages, which matters at this size alone."""
    task = make("diskgnn", blow_up=blow_up, segment=7, steps=7)
    drawn(task, 7)
    (folder,) = (task_root(task) / "graphs" / "plans").glob("*")
    found = plan.json.loads((folder / "plan.json").read_text())
    rows = sum(rows for _, rows in found["regions"])
    assert rows * ROW <= blow_up * NODES * ROW
    assert (folder / "packed.bin").stat().st_size <= rows * ROW + PAGE * len(found["regions"])
    assert found["shared_from"] == (8 if blow_up == 50 else found["shared_from"])


def task_root(task: Graph) -> Path:
    return Path(task.data.root)


def test_too_little_disk(make: Callable[..., Graph]) -> None:
    with pytest.raises(ConfigError, match=r"graph.blow_up=0.1: the batches of a plan need \d") as e:
        drawn(make("diskgnn", blow_up=0.1), 1)
    assert "\n" not in str(e.value)
    assert not any((Path(make().data.root) / "graphs" / "plans").glob("*"))


def test_too_little_memory_for_a_part(make: Callable[..., Graph]) -> None:
    with pytest.raises(ConfigError, match=r"graph.host_mb=0.001: one of graph.parts=2 needs"):
        make("partition", parts=2, host_mb=0.001)


def test_packing_in_several_passes(
    make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for some rows and pieces of a few pages the file is the same."""
    once, often = make("diskgnn", steps=7), make("diskgnn", steps=7)
    drawn(once, 7)
    (folder,) = (task_root(once) / "graphs" / "plans").glob("*")
    expected = (folder / "packed.bin").read_bytes()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    passes = []
    run = packing._Packing._pass
    monkeypatch.setattr(packing, "_PASS_ROW_BYTES", 1 << 24)
    monkeypatch.setattr(packing, "_PIECE", 5000)
    monkeypatch.setattr(
        packing._Packing, "_pass", lambda self, *given: (passes.append(1), run(self, *given))
    )
    drawn(often, 7)
    assert (folder / "packed.bin").read_bytes() == expected and len(passes) > 2


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


@pytest.mark.parametrize("name", ["packed.bin", "sampled.bin", "notes.bin", "packed.bin.sums"])
@pytest.mark.parametrize("tear", TEARS)
def test_torn_plans_are_made_again(make: Callable[..., Graph], name: str, tear: str) -> None:
    expected = drawn(make("diskgnn", steps=7), 7)
    (folder,) = (task_root(make()) / "graphs" / "plans").glob("*")
    TEARS[tear](folder / name)
    assert_same(drawn(make("diskgnn", steps=7), 7), expected)
    made = (folder / "plan.json").stat().st_mtime_ns
    assert_same(drawn(make("diskgnn", steps=7), 7), expected)
    assert (folder / "plan.json").stat().st_mtime_ns == made


def test_torn_amid_a_run(make: Callable[..., Graph]) -> None:
    """What is damaged while it is in use is found, too, and training goes on with the batch it had
    come to."""
    task = make("diskgnn", ahead=0)
    expected = drawn(make(), 7)
    batches = task.batches(mesh(), 0)
    found = list(islice(batches, 2))
    (folder,) = (task_root(task) / "graphs" / "plans").glob("*")
    size = (folder / "packed.bin").stat().st_size
    write_at(folder / "packed.bin", 0, bytes(size))
    found += islice(batches, 5)
    batches.close()
    assert_same(found, expected)


def test_a_disk_that_keeps_nothing(
    make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line instead of packing for ever."""

    def forgetful(self: Any, number: int) -> Any:
        raise Torn("packed.bin is damaged in its pages 0 to 1")

    monkeypatch.setattr(plan.Plan, "neighbourhood", forgetful)
    with pytest.raises(ConfigError, match="the disk does not keep what is written"):
        drawn(make("ginex"), 1)


def test_a_full_disk(make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and nothing half is left."""

    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device; make room, or plan fewer") as e:
        drawn(make("diskgnn"), 1)
    assert "\n" not in str(e.value)
    assert list((Path(make().data.root) / "graphs" / "plans").iterdir()) == []


def test_plans_stay_for_other_runs(
    make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drawn(make("diskgnn", steps=7), 7)
    monkeypatch.setattr(plan, "_make", lambda *_: pytest.fail("it is there"))
    assert_same(drawn(make("diskgnn", hidden=16, steps=7), 7), expected)


def size(folder: Path) -> int:
    """Bytes of a plan; 0 where a thread removes it as this one looks."""
    with contextlib.suppress(FileNotFoundError):
        return plan._bytes(folder)
    return 0


def test_old_plans_make_room(make: Callable[..., Graph]) -> None:
    """Beside those in use as much stays as the workers' limits allow, the newest; a plan in use is
    never removed."""
    task = make("diskgnn", steps=70, blow_up=3.0)
    folder = task_root(task) / "graphs" / "plans"
    limit = 2 * 3 * NODES * ROW
    held = task.batches(mesh(1), 0)
    next(held)
    (used,) = folder.glob("*")
    largest = 0
    for number, _ in enumerate(islice(task.batches(mesh(), 0), 70)):
        if number % 7 == 6:
            largest = max(largest, *map(size, folder.glob("*")))
    assert used.exists() and len(list(folder.glob("*"))) < 11
    kept = sum(map(size, folder.glob("*")))
    assert kept <= limit + largest * 2
    held.close()


def test_counts_of_reads(make: Callable[..., Graph]) -> None:
    """Rows that no cache held, and whole pages for them."""
    for store in ("ginex", "diskgnn", "partition"):
        task = make(store, host_mb=4 * KIB)
        drawn(task, 7)
        totals = task.read()
        assert totals.needed_bytes % ROW == 0 and totals.needed_bytes > 0
        assert totals.read_bytes >= PAGE
        planned = store != "partition"
        assert (totals.planning_s > 0) == planned and (totals.plan_bytes > 0) == planned
    assert make().read().needed_bytes == 0


@pytest.mark.parametrize("store", ["ginex", "partition", "diskgnn"])
def test_features_that_shrink(tmp_path: Path, store: str) -> None:
    """One line with the file, and how to look through the graph."""
    path = random_graph.write(tmp_path / "mine").folder
    given = {"batch_size": BATCH, "steps": 20, "store": StoreName(store)}
    task = built("graph", tmp_path, path, num_workers=2, **given)
    os.truncate(path / "features.bin", NODES * ROW - 1)
    why = "cannot be read: has 7199 bytes, not 7200"
    with pytest.raises(ConfigError, match=rf"graph=.*features.bin: {why}") as e:
        drawn(task, 10)
    assert str(e.value).endswith(f"python -m tasks.prepare graph --check {path}")


def test_rows_of_a_file(tmp_path: Path) -> None:
    """Of all row sizes and places, also at the end of the file and over the borders of pages."""
    random = np.random.default_rng(0)
    for width in (1, 24, 100, 4096, 5000):
        data = random.integers(0, 256, (700, width), dtype=np.uint8)
        (tmp_path / "rows").write_bytes(data.tobytes())
        file = DirectFile(tmp_path / "rows", Readers(3))
        for count in (0, 1, 5, 300, 700):
            chosen = np.sort(random.permutation(700)[:count])
            assert np.array_equal(read_rows(file, chosen, width), data[chosen])
        assert file.bytes_read > 0
        file.close()


def test_a_table_amid_a_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (200, 40), dtype=np.uint8)
    (tmp_path / "rows").write_bytes(bytes(3 * PAGE) + data.tobytes())
    file = DirectFile(tmp_path / "rows", Readers(2))
    assert np.array_equal(read_rows(file, np.array([0, 7, 199]), 40, 3), data[[0, 7, 199]])


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


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(4 * PAGE))
    file = DirectFile(tmp_path / "rows", Readers(2))
    os.truncate(tmp_path / "rows", PAGE)
    with pytest.raises(OSError, match="is shorter than it was"):
        file.pages(np.array([0]), np.array([4]))


@pytest.mark.parametrize("backwards", [False, True])
def test_records(tmp_path: Path, backwards: bool) -> None:
    kind = np.dtype(np.int32)
    written = [[np.arange(n), np.array([n, -n])] for n in (0, 3, 5000)]
    with RecordsWriter(tmp_path / "records", kind, backwards) as writer:
        for record in written:
            writer.write(record)
    records = Records(tmp_path / "records", kind, writer.index, Readers(1))
    expected = written[::-1] if backwards else written
    for number, record in enumerate(expected):
        found = records.read(number)
        assert all(np.array_equal(*pair) for pair in zip(found, record, strict=True))


class TestAhead:
    def test_in_order(self) -> None:
        assert list(ahead(iter(range(100)), 3)) == list(range(100))

    def test_no_further_than_that(self) -> None:
        """So many are made ahead, and one more is in the thread's hands."""
        made: list[int] = []
        enough = threading.Event()

        def numbers() -> Iterator[int]:
            for number in range(100):
                made.append(number)
                if number == 4:
                    enough.set()
                yield number

        found = ahead(numbers(), 3)
        assert next(found) == 0 and enough.wait(10)
        assert not threading.Event().wait(0.05) and made == [0, 1, 2, 3, 4]
        found.close()

    def test_errors_come_in_their_turn(self) -> None:
        def fails() -> Iterator[int]:
            yield 1
            raise ConfigError("key", "value", "hint")

        found = ahead(fails(), 2)
        assert next(found) == 1
        with pytest.raises(ConfigError, match="key=value: hint"):
            next(found)

    @pytest.mark.parametrize("depth", [0, 1, 5])
    def test_closing_closes_what_makes(self, depth: int) -> None:
        closed, before = threading.Event(), set(threading.enumerate())

        def endless() -> Iterator[int]:
            try:
                while True:
                    yield 1
            finally:
                closed.set()

        found = ahead(endless(), depth)
        next(found)
        found.close()
        assert closed.is_set()
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", Network)
def test_learns(make: Callable[..., Graph], kind: Network) -> None:
    """Features tell the class; the evaluation sees it on the validation nodes."""
    task = make(model=kind, dropout=0.0, steps=150)
    model = task.model()
    optimizer = task.optimizer(model)
    before = task.evaluate(model)
    for batch in islice(task.batches(mesh(), 0), 150):
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = task.evaluate(model)
    assert after["loss"] < 0.8 * before["loss"] and after["accuracy"] > 0.7
    assert after == task.evaluate(model) == make("diskgnn", model=kind).evaluate(model)
    assert 1 / 3 < task.baselines()["majority_accuracy"] < 0.7
