"""Every published data set as a few generated samples, in its own layout and of its own shapes.

What is drawn tells nothing: pictures are soft noise, tokens and labels are random. The loaders, the
augmentation and the shapes of the batches are those of a published recipe.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.glue.glue_tables import GLUE_TASKS
from tasks.prepare.__main__ import main as prepare
from tasks.text.store import create

if TYPE_CHECKING:
    from PIL import Image

WINDOWS = 64
"""Windows of 1,024 tokens in each part of a text."""
CLASSES = 1000
"""Of ImageNet. Every class has one picture to train on and one to validate."""
PAPERS, CITATIONS = 20_000, 400_000
ROWS = 64
"""Of each split of GLUE."""


def openwebtext(root: Path) -> Path:
    """Random tokens of GPT-2's vocabulary."""
    return _text(root / "openwebtext", 50_257, 50_256, {})


def few_words(root: Path) -> Path:
    """The same with 8,192 tokens, for a model whose embedding would fill this machine."""
    return _text(root / "few_words" / "openwebtext", 8_192, 8_191, {})


def wikibooks(root: Path) -> Path:
    """Random tokens of RoBERTa's vocabulary, and a tokenizer of as many: bytes, and words that no
    text has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special, size = ["<s>", "<pad>", "</s>", "<unk>"], 50_265
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<unused {number}>" for number in range(size - 1 - len(words))] + ["<mask>"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*special, "<mask>")])
    return _text(root / "wikibooks", size, 2, {"tokenizer.json": tokenizer.to_str()})


def _text(folder: Path, vocab_size: int, separator: int, files: dict[str, str]) -> Path:
    draw = np.random.default_rng(vocab_size)
    parts = {}
    for part in ("train", "val"):
        tokens = draw.integers(4, vocab_size - 1, WINDOWS * 1024)
        tokens[499::500] = separator
        parts[part] = [tokens]
    create(folder, parts, vocab_size, separator, {"tokenizer": "generated"}, files)
    return folder


def imagenet(root: Path) -> Path:
    """JPEG files of 500×375 pixels, the commonest size, in folders of ImageNet's names."""
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(CLASSES):
            folder = root / "imagenet" / part / f"n{number:08d}"
            folder.mkdir(parents=True)
            _picture(draw, 500, 375).save(folder / f"{part}_{number}.JPEG", quality=80)
    return root / "imagenet"


def ade20k(root: Path) -> Path:
    """Pictures of 683×512 pixels with masks of 150 classes and unlabelled pixels, in blocks."""
    from PIL import Image

    draw, base = np.random.default_rng(1), root / "ADEChallengeData2016"
    for split, short, count in (("training", "train", 16), ("validation", "val", 8)):
        for kind in ("images", "annotations"):
            (base / kind / split).mkdir(parents=True)
        for number in range(1, count + 1):
            name = f"ADE_{short}_{number:08d}"
            _picture(draw, 683, 512).save(base / "images" / split / f"{name}.jpg", quality=80)
            classes = draw.integers(0, 151, (8, 11), np.uint8)
            mask = classes.repeat(64, 0).repeat(64, 1)[:512, :683]
            Image.fromarray(mask).save(base / "annotations" / split / f"{name}.png")
    return base


def shapenet(root: Path) -> Path:
    """Clouds of 8,192 points on balls, cubes and everything between, in 55 categories."""
    draw, base = np.random.default_rng(2), root / "shapenet55"
    (base / "shapenet_pc").mkdir(parents=True)
    (base / "ShapeNet-55").mkdir()
    for part, count in (("train", 4), ("test", 1)):
        names = []
        for kind in range(55):
            for number in range(count):
                points = draw.normal(size=(8192, 3))
                points /= np.linalg.norm(points, ord=2 + kind, axis=1, keepdims=True)
                names.append(f"{kind:08d}-{part}{number}.npy")
                np.save(base / "shapenet_pc" / names[-1], points.astype(np.float32))
        (base / "ShapeNet-55" / f"{part}.txt").write_text("\n".join(names) + "\n")
    return base


def glue(root: Path) -> Path:
    """All nine tasks as parquet files: sentences of random words, random labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, words = np.random.default_rng(3), ["replica", "round", "anchor", "step", "late", "mean"]
    for name, task in GLUE_TASKS.items():
        (root / "glue" / name).mkdir(parents=True)
        for split in task.rows:
            columns: dict[str, object] = {
                column: [" ".join(draw.choice(words, 12)) for _ in range(ROWS)]
                for column in task.columns
            }
            few = task.num_labels == 1
            labels = draw.random(ROWS) * 5 if few else draw.integers(0, task.num_labels, ROWS)
            table = pa.table({**columns, "label": labels})
            pq.write_table(table, root / "glue" / name / f"{split}-00000-of-00001.parquet")
    return root / "glue"


def papers100m(root: Path) -> Path:
    """OGB's files with fewer nodes, and what `tasks.prepare graph` makes of them."""
    draw, published = np.random.default_rng(4), root / "papers100M-bin"
    (published / "raw").mkdir(parents=True)
    (published / "split" / "time").mkdir(parents=True)
    np.savez(
        published / "raw" / "data.npz",
        edge_index=draw.integers(PAPERS, size=(2, CITATIONS)),
        num_nodes_list=np.array([PAPERS]),
        num_edges_list=np.array([CITATIONS]),
        node_feat=draw.normal(size=(PAPERS, 128)).astype(np.float32),
        node_year=np.zeros((PAPERS, 1), np.int64),
    )
    labels = draw.integers(172, size=(PAPERS, 1)).astype(np.float32)
    np.savez(published / "raw" / "node-label.npz", node_label=labels)
    order = draw.permutation(PAPERS)
    for name, nodes in (("train", order[:8000]), ("valid", order[8000:9000]), ("test", order[-9:])):
        with gzip.open(published / "split" / "time" / f"{name}.csv.gz", "wt") as file:
            file.write("".join(f"{node}\n" for node in nodes))
    words = ["graph", "--set", "papers100m", "--source", str(published), "--root", str(root)]
    assert prepare(words) == 0
    return root / "graphs" / "papers100m"


def _picture(draw: np.random.Generator, width: int, height: int) -> "Image.Image":
    from PIL import Image

    coarse = draw.integers(0, 256, (height // 25 + 1, width // 25 + 1, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


SETS: dict[str, Callable[[Path], Path]] = {
    "openwebtext": openwebtext,
    "few_words": few_words,
    "wikibooks": wikibooks,
    "imagenet": imagenet,
    "ade20k": ade20k,
    "shapenet": shapenet,
    "glue": glue,
    "graph": papers100m,
}
VERIFIED_AS = {"few_words": "openwebtext"}
"""The names that `python -m tasks.prepare` knows them by, where they have others here."""


def make(name: str, root: Path) -> None:
    """Write a set below `root`, unless it is there, and read every sample of it as
    `python -m tasks.prepare NAME --verify` does."""
    done = root / f"{name}.json"
    if done.exists():
        return
    folder = SETS[name](root)
    words = [VERIFIED_AS.get(name, name), "--verify", str(folder)]
    assert prepare(words) == 0, f"{name}: see the lines above"
    done.write_text(json.dumps({"folder": str(folder)}))
