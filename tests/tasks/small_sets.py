"""Small sources of every public data set, in the formats in which they are published, and what a
command makes of them."""

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from tokenizers import Tokenizer

from co2.task import Task
from tasks.ade20k.ade20k import Source
from tasks.ade20k.pairs import FOLDER
from tasks.glue.glue import Name
from tasks.glue.glue_tables import GLUE_TASKS
from tasks.graph.graph import DatasetName as Graphs
from tasks.prepare import ade20k, fashion_mnist, graph, imagenet, shapenet, wikibooks
from tasks.shapenet.shapenet import Shapes
from tasks.text.causal import CorpusName
from tasks.text.roberta import CorpusName as Masked
from tasks.vision.classification import DatasetName
from tests.tasks import small_glue
from tests.tasks.build import built
from tests.tasks.conftest import story
from tests.tasks.pictures import picture

NODES = 40


@dataclass(frozen=True)
class SmallGraph:
    """What a written set holds."""

    folder: Path
    sources: np.ndarray
    targets: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    """-1 for none."""
    parts: dict[str, np.ndarray]
    """Empty where the set has none."""


def drawn(
    folder: Path, features: int, dtype: type, classes: int, nodes: int = NODES, edges: int = 300
) -> SmallGraph:
    """Edges with self-loops and with some that recur; two thirds of the nodes have labels."""
    draw = np.random.default_rng(nodes)
    sources, targets = draw.integers(nodes, size=(2, edges))
    sources[:5], targets[:5], targets[5:10] = sources[5:10], targets[5:10], sources[5:10]
    rows = draw.normal(size=(nodes, features)).astype(dtype)
    labels = draw.integers(classes, size=nodes)
    labels[1:3] = 0, classes - 1  # the least and the largest
    labels[::3] = -1
    known = draw.permutation(np.flatnonzero(labels >= 0))
    parts = {"train": known[:12], "val": known[12:18], "test": known[18:]}
    return SmallGraph(folder, sources, targets, rows, labels, parts)


def unlabelled(labels: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """As the sets have them, NaN for none."""
    return np.where(labels < 0, np.nan, labels).astype(dtype)


def papers100m(folder: Path, compressed: bool = False, by_columns: bool = False) -> SmallGraph:
    small = drawn(folder, 6, np.float32, 172)
    (folder / "raw").mkdir(parents=True)
    save = np.savez_compressed if compressed else np.savez
    edges = np.stack([small.sources, small.targets])
    save(
        folder / "raw" / "data.npz",
        edge_index=np.asfortranarray(edges) if by_columns else edges,
        num_nodes_list=np.array([NODES]),
        num_edges_list=np.array([edges.shape[1]]),
        node_feat=small.features,
        node_year=np.zeros((NODES, 1), np.int64),
    )
    save(folder / "raw" / "node-label.npz", node_label=unlabelled(small.labels)[:, None])
    (folder / "split" / "time").mkdir(parents=True)
    for name, part in (("train", "train"), ("valid", "val"), ("test", "test")):
        with gzip.open(folder / "split" / "time" / f"{name}.csv.gz", "wt") as file:
            file.write("".join(f"{node}\n" for node in small.parts[part]))
    return small


def mag240m(folder: Path, tensors: bool = False) -> SmallGraph:
    small = drawn(folder, 6, np.float16, 153)
    train, val, test = small.parts.values()
    labels = small.labels.copy()
    labels[test] = -1  # not published
    papers = folder / "processed" / "paper"
    papers.mkdir(parents=True)
    np.save(papers / "node_feat.npy", small.features)
    np.save(papers / "node_label.npy", unlabelled(labels))
    cites = folder / "processed" / "paper___cites___paper"
    cites.mkdir()
    np.save(cites / "edge_index.npy", np.stack([small.sources, small.targets]))
    kept = {"train": train, "valid": val, "test": test}
    as_kept = torch.from_numpy if tensors else np.asarray
    torch.save({name: as_kept(own) for name, own in kept.items()}, folder / "split_dict.pt")
    return replace(small, labels=labels, parts={**small.parts, "test": test[:0]})


def igb(folder: Path, raw: bool = False) -> SmallGraph:
    small = drawn(folder, 1024, np.float32, 19)
    papers = folder / "processed" / "paper"
    papers.mkdir(parents=True)
    labels = np.abs(small.labels).astype(np.float32)  # all have one
    for name, array in (("node_feat", small.features), ("node_label_19", labels)):
        if raw:
            array.tofile(papers / f"{name}.npy")
        else:
            np.save(papers / f"{name}.npy", array)
    cites = folder / "processed" / "paper__cites__paper"
    cites.mkdir()
    np.save(cites / "edge_index.npy", np.stack([small.sources, small.targets], axis=1))
    parts = {"train": np.arange(24), "val": np.arange(24, 32), "test": np.arange(32, 40)}
    return replace(small, labels=labels.astype(int), parts=parts)


def friendster(folder: Path) -> SmallGraph:
    """The numbers of its nodes have gaps: node n is 101 + 7·n."""
    small = drawn(folder, 1, np.float32, 2)
    folder.mkdir()
    lines = "".join(
        f"{101 + 7 * a}\t{101 + 7 * b}\n" for a, b in zip(small.sources, small.targets, strict=True)
    )
    with gzip.open(folder / "com-friendster.ungraph.txt.gz", "wt") as file:
        file.write("# Undirected graph\n# FromNodeId\tToNodeId\n" + lines)
    return small


def shapenet55(folder: Path, train: int = 14, test: int = 5, points: int = 40) -> Path:
    """A folder in the layout of ShapeNet-55: two categories, 40 points in four columns."""
    for name in ("shapenet_pc", "ShapeNet-55"):
        (folder / name).mkdir(parents=True)
    source = np.random.default_rng(0)
    for part, number in (("train", train), ("test", test)):
        names = [f"0269{n % 2}156-{part}{n}-a.npy" for n in range(number)]
        for n, name in enumerate(names):
            cloud = source.normal(size=(points, 4)) * [1, 1, 5 if n % 2 else 0.2, 1] + 7
            np.save(folder / "shapenet_pc" / name, cloud.astype(np.float64))
        (folder / "ShapeNet-55" / f"{part}.txt").write_text("\n".join(names) + "\n\n")
    return folder


def modelnet40(folder: Path, train: int = 12, test: int = 6, points: int = 40) -> Path:
    """A folder in the layout of ModelNet40: two categories, flat and long."""
    names, source = ("flat", "night_stand"), np.random.default_rng(1)
    folder.mkdir()
    (folder / "modelnet40_shape_names.txt").write_text("\n".join(names) + "\n")
    for part, number in (("train", train), ("test", test)):
        listed = [f"{names[n % 2]}_{n:04d}{part == 'test':d}" for n in range(number)]
        (folder / f"modelnet40_{part}.txt").write_text("\n".join(listed) + "\n")
        for n, name in enumerate(listed):
            cloud = source.normal(size=(points, 6)) * [1, 1, 5 if n % 2 else 0.1, 1, 1, 1] + 3
            file = folder / names[n % 2] / f"{name}.txt"
            file.parent.mkdir(exist_ok=True)
            np.savetxt(file, cloud, "%.6f", delimiter=",")
    return folder


@dataclass(frozen=True)
class Given:
    """A small source."""

    options: list[str]
    """Of the command, without --root."""
    files: list[Path]
    """Those that the command needs whole."""
    made: str
    """Path below the root."""
    task: Callable[[Path, Path], Task]
    """What trains on it: a function of the root and of a text."""
    by_name: Callable[[Path], Task] | None = None
    """A task that asks for the data set by its name, where `task` gives a path."""
    goes_on: bool = True
    """Whether a run that was stopped is gone on with; otherwise it begins again."""
    root_first: bool = False
    """Whether a root that cannot be written is told before the source is looked at."""
    spoilt: list[str] = field(default_factory=list)
    """Patterns of files whose damage --verify finds."""

    def wanted(self, root: Path, text: Path) -> Task:
        """What says how the data set is made, where it is not there yet."""
        return self.task(root, text) if self.by_name is None else self.by_name(root)


def zipped(path: Path, held: Iterable[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in held:
            pack.writestr(name, content)
    return path


def rolled(path: Path, held: Iterable[tuple[str, bytes]]) -> Path:
    """A tar, which is packed where its name says so."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as roll:
        for name, content in held:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            roll.addfile(info, io.BytesIO(content))
    return path


SCENES = {
    "training": [(40, 60), (64, 48), (50, 50), (33, 90)],
    "validation": [(45, 70), (80, 40), (36, 36)],
}
"""Height and width of each image."""


def scenes(folder: Path, **numbers: int) -> Path:
    """Images of noise; masks of the classes 0 to 150 in blocks, each class somewhere.

    Args:
        numbers: of images by split, whose sizes recur then.
    """
    source = np.random.default_rng(0)
    for split, known in SCENES.items():
        sizes = [known[number % len(known)] for number in range(numbers.get(split, len(known)))]
        for kind in ("images", "annotations"):
            (folder / kind / split).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes, 1):
            pixels = source.integers(0, 256, (height, width, 3), np.uint8)
            classes = source.integers(0, 151, (height // 8 + 1, width // 8 + 1), np.uint8)
            mask = classes.repeat(8, 0).repeat(8, 1)[:height, :width]
            Image.fromarray(pixels).save(scene_image(folder, split, number), quality=95)
            Image.fromarray(mask).save(scene_mask(folder, split, number))
    return folder


def _scene(split: str, number: int) -> str:
    return f"ADE_{'train' if split == 'training' else 'val'}_{number:08d}"


def scene_image(folder: Path, split: str, number: int) -> Path:
    return folder / "images" / split / f"{_scene(split, number)}.jpg"


def scene_mask(folder: Path, split: str, number: int) -> Path:
    return folder / "annotations" / split / f"{_scene(split, number)}.png"


def of_ade20k(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    there = scenes(folder / "made" / FOLDER)
    files = sorted(path for path in there.rglob("*") if path.is_file())
    held = [(f"{FOLDER}/{path.relative_to(there)}", path.read_bytes()) for path in files]
    others = [(f"{FOLDER}/", b""), (f"{FOLDER}/objectInfo150.txt", b"wall\n")]
    archive = zipped(folder / "archive.zip", [*others, ("__MACOSX/._junk", b"junk"), *held])
    counts = {split: len(sizes) for split, sizes in SCENES.items()}
    patch.setattr(ade20k, "SPLITS", counts)
    return Given(
        ["ade20k", "--archive", str(archive)],
        [archive],
        FOLDER,
        lambda root, _: built("ade20k", root, batch_size=2, source=Source.ade20k, hidden=8),
        spoilt=["*.jpg", "*.png"],
    )


def idx(values: np.ndarray) -> bytes:
    """The format of MNIST's files: zeros, the type (8: uint8), the dimensions, the values."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


CLOTHES = {"train": 80, "val": 30}


def clothes() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By part, images that are as bright as their label tells, and labels."""
    source, made = np.random.default_rng(0), {}
    for part, count in CLOTHES.items():
        labels = source.permutation(np.arange(count, dtype=np.uint8) % 10)
        noise = source.integers(0, 9, (count, 28, 28), np.uint8)
        made[part] = (labels[:, None, None] * np.uint8(20) + noise, labels)
    return made


def of_fashion_mnist(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    """The four files, whose checksums are taken for the published ones."""
    known, whole = {}, hashlib.sha256()
    for part, arrays in clothes().items():
        names = [name for name, _ in fashion_mnist.SOURCES[part]]
        for name, array in zip(names, arrays, strict=True):
            (folder / name).write_bytes(gzip.compress(idx(array)))
        sums = [hashlib.sha256(idx(array)).hexdigest() for array in arrays]
        known[part] = tuple(zip(names, sums, strict=True))
        images, labels = arrays
        order = np.argsort(labels, kind="stable")
        whole.update(images[order].tobytes() + labels[order].astype(np.int64).tobytes())
    patch.setattr(fashion_mnist, "SOURCES", known)
    patch.setattr(fashion_mnist, "PACKED", whole.hexdigest())
    return Given(
        ["fashion_mnist", "--source", str(folder)],
        sorted(folder.iterdir()),
        "fashion_mnist",
        lambda root, _: built("resnet50", root, root / "fashion_mnist"),
        goes_on=False,
        spoilt=["*.npy"],
    )


def of_glue(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    there = small_glue.write(folder / "source")
    for task in GLUE_TASKS.values():
        for split in task.rows:
            patch.setitem(task.rows, split, small_glue.ROWS[split])
    return Given(
        ["glue", "--source", str(there)],
        [there / name / "train-00000-of-00002.parquet" for name in ("cola", "stsb")],
        "glue",
        lambda root, text: built("glue", root, text, name=Name.rte, context=34, vocab_size=300),
        root_first=True,
        spoilt=["*.parquet"],
    )


def of_graph(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    small = papers100m(folder / "bin", compressed=True)
    patch.setitem(graph.KNOWN, "papers100m", {"nodes": NODES, "train": 12})
    return Given(
        ["graph", "--set", "papers100m", "--source", str(small.folder)],
        sorted(path for path in small.folder.rglob("*") if path.is_file()),
        "graphs/papers100m",
        lambda root, _: built("graph", root, dataset=Graphs["papers100m"]),
        goes_on=False,
        spoilt=["features.bin", "labels.bin", "neighbours.bin"],
    )


def of_generated_graph(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    """Of which there is no source."""
    rule = ["--nodes", "200", "--features", "4", "--classes", "4"]
    return Given(
        ["graph", "--set", "generated", *rule],
        [],
        "graphs/generated",
        lambda root, _: built("graph", root, dataset=Graphs["generated"]),
        goes_on=False,
        spoilt=["starts.bin", "train.bin"],
    )


CLASSES = ["n01440764", "n01443537", "n01484850"]
TRUTH = [3, 1, 2, 1, 3, 2]
"""Of the validation pictures: numbers of the classes, which are not in the order of the names."""
NUMBERS = {3: CLASSES[0], 1: CLASSES[1], 2: CLASSES[2]}


def jpeg(seed: int) -> bytes:
    data = io.BytesIO()
    picture((100, 100, 100), (24, 20), seed).save(data, "JPEG")
    return data.getvalue()


def of_imagenet(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    """The three archives, and sums that fit them."""
    inner = {}
    for label, name in enumerate(CLASSES):
        pictures = {f"{name}_{n}.JPEG": jpeg(10 * label + n) for n in range(4)}
        packed = rolled(folder / "inner.tar", pictures.items())
        inner[f"{name}.tar"] = packed.read_bytes()
        packed.unlink()
    val = {f"ILSVRC2012_val_{n:08d}.JPEG": jpeg(100 + n) for n in range(1, 7)}
    kind = [(name, "O") for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    rows: list[tuple[object, ...]] = [(n, name, "words", "", 0) for n, name in NUMBERS.items()]
    rows.append((1001, "n00001740", "entity", "above them all", 2))
    meta = io.BytesIO()
    savemat(meta, {"synsets": np.array(rows, dtype=kind)})
    top = "ILSVRC2012_devkit_t12/data"
    truth = "".join(f"{n}\n" for n in TRUTH).encode()
    kit = {f"{top}/ILSVRC2012_validation_ground_truth.txt": truth}
    kit[f"{top}/meta.mat"] = meta.getvalue()
    sums = {}
    for part, held in (("train", inner), ("val", val), ("devkit", kit)):
        name, _ = imagenet.ARCHIVES[part]
        content = rolled(folder / name, held.items()).read_bytes()
        sums[part] = (name, hashlib.md5(content, usedforsecurity=False).hexdigest())
    patch.setattr(imagenet, "ARCHIVES", sums)
    patch.setattr(imagenet, "_classes", lambda: set(CLASSES))
    patch.setattr(imagenet, "VAL_OF_CLASS", 2)
    patch.setattr(imagenet, "NUM_TRAIN", 12)
    return Given(
        ["imagenet", "--archives", str(folder)],
        [folder / name for name, _ in sums.values()],
        "imagenet",
        lambda root, _: built("resnet50", root, root / "imagenet"),
        by_name=lambda root: built("resnet50", root, dataset=DatasetName.imagenet),
        spoilt=["*.JPEG"],
    )


def byte_tokenizer(path: Path, first: list[str], last: list[str]) -> Path:
    """A BPE of bytes alone, with special tokens in front of and behind them."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    learned = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*first, *learned, *last])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in [*first, *last]])
    tokenizer.save(str(path))
    return path


DOCUMENTS = [f"{n} {story(60, seed=n)}<|endoftext|>" for n in range(120)]


def of_openwebtext(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    from datasets import Dataset

    Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(str(folder / "saved"))
    tokenizer = byte_tokenizer(folder / "tokenizer.json", [], ["<|endoftext|>"])
    source = ["--source", str(folder / "saved"), "--tokenizer", str(tokenizer)]
    return Given(
        ["openwebtext", *source, "--shards", "6", "--val-share", "0.1"],
        [tokenizer, *(folder / "saved").glob("*.arrow")],
        "openwebtext",
        lambda root, _: built("gpt2", root, corpus=CorpusName.openwebtext, context=32),
        root_first=True,
        spoilt=["train.bin", "val.bin"],
    )


ARTICLES = [f"{n} {story(60, seed=n)}</s><mask>" for n in range(60)]
ARTICLES[20:20] = ["", " \n"]
SENTENCES = [f"sentence {n} of a book ." for n in range(95)]
ROBERTA_FIRST = ["<s>", "<pad>", "</s>", "<unk>"]


def of_wikibooks(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    """Wikipedia as two parquet files with more columns; the books as JSON lines, of which ten are a
    document."""
    from datasets import Dataset

    wikipedia, books = folder / "wikipedia", folder / "books"
    wikipedia.mkdir(), books.mkdir()
    for number, rows in enumerate((ARTICLES[:30], ARTICLES[30:])):
        data = Dataset.from_dict({"id": [str(n) for n in range(len(rows))], "text": rows})
        data.to_parquet(str(wikipedia / f"train-{number:05d}-of-00002.parquet"))
    lines = [json.dumps({"text": sentence}) for sentence in SENTENCES]
    (books / "books.jsonl").write_text("\n".join(lines))
    tokenizer = byte_tokenizer(folder / "tokenizer.json", ROBERTA_FIRST, ["<mask>"])
    patch.setattr(wikibooks, "JOINED", 10)
    source = ["--source", str(wikipedia), "--sentences", str(books), "--tokenizer", str(tokenizer)]
    return Given(
        ["wikibooks", *source, "--shards", "6", "--val-share", "0.2"],
        [tokenizer, *sorted(wikipedia.iterdir()), books / "books.jsonl"],
        "wikibooks",
        lambda root, _: built("roberta", root, corpus=Masked.wikibooks, context=34),
        root_first=True,
        spoilt=["train.bin", "val.bin"],
    )


CLOUDS = {"train": [f"0{n % 2}-t{n}.npy" for n in range(6)], "test": ["00-v0.npy", "01-v1.npy"]}
LISTS = {f"x/ShapeNet-55/{part}.txt": "\n".join(own).encode() for part, own in CLOUDS.items()}


def npy(seed: int, points: int = 1024) -> bytes:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(seed).normal(size=(points, 3)).astype(np.float32))
    return file.getvalue()


def clouds() -> dict[str, bytes]:
    names = [name for part in CLOUDS.values() for name in part]
    return {f"ShapeNet55/shapenet_pc/{name}": npy(n) for n, name in enumerate(names)}


def of_shapenet(folder: Path, patch: pytest.MonkeyPatch) -> Given:
    archive = zipped(folder / "clouds.zip", (clouds() | LISTS).items())
    patch.setattr(shapenet, "NUM_CLOUDS", {"train": 6, "test": 2})
    patch.setattr(shapenet, "NUM_CATEGORIES", 2)
    own = {"shapes": Shapes.shapenet55, "groups": 8, "group_size": 8}
    return Given(
        ["shapenet", "--archive", str(archive)],
        [archive],
        "shapenet55",
        lambda root, _: built("shapenet", root, **own),
        spoilt=["*.npy"],
    )


GIVEN: dict[str, Callable[[Path, pytest.MonkeyPatch], Given]] = {
    "ade20k": of_ade20k,
    "fashion_mnist": of_fashion_mnist,
    "glue": of_glue,
    "graph": of_graph,
    "graph generated": of_generated_graph,
    "imagenet": of_imagenet,
    "openwebtext": of_openwebtext,
    "shapenet": of_shapenet,
    "wikibooks": of_wikibooks,
}
"""Functions that write a source into an empty folder. Each patches the published numbers and sums
with those of what it writes."""
