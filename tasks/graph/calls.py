"""The embedded graph: which function of sympy's source calls which.

Nodes are functions and methods (`tasks.graph.source`); an edge joins, both ways, a function and
one that it calls. The class is the sub-package: polys, physics, printing, … One with fewer than
`FEWEST` functions is no class, and its functions, like those of sympy's own modules, have no label.
Parts are drawn by a hash of the qualified name: 60 % train, 20 % val, 20 % test.

Features are the words of a function's own text, docstring and comments included, split at case and
underscore: each adds the square root of its count to one of `FEATURES` places, with a sign, both
by its hash (the hashing trick; Weinberger et al. 2009, arXiv 0902.2206). A row has norm 1.

The label is not in the features: neither module nor class is part of the text, and lines that
import and dotted names that begin with sympy are left out. Words can still tell it as far as they
are about it, such as "poly", "latex" or "matrix", and the name of the package where prose has it.
Logistic regression on a node's own features gets 63 % of the test nodes right, with averages over
neighbours 78 %; the largest class has 19 %.
"""

import hashlib
import keyword
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from co2.atomic import locked
from co2.errors import ConfigError
from tasks.graph.edges import write_rows
from tasks.graph.folder import FORMAT, LABEL, PARTS, GraphFolder, create, open_graph, write_array
from tasks.graph.source import Function, Program
from tasks.shared.corpus import Corpus, embedded_corpus

FEATURES = 128
FEWEST = 100
"""Functions of a class; with fewer, val and test hold too few to measure."""
_SHARES = {"train": 60, "val": 20, "test": 20}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_IMPORT = re.compile(r"\s*(>>>|\.\.\.)\s*(from|import)\b")
"""A line of an example in a docstring."""
_DOTTED = re.compile(r"\bsympy(\.\w+)+")
_EMPTY = frozenset(keyword.kwlist) | {"self", "cls"}


def prepared(root: Path) -> GraphFolder:
    """Return the graph from the cache below `root` (`data.root`), or make it, in about ten seconds.

    Raises:
        ConfigError: sympy is not installed, or `root` cannot be written.
    """
    corpus = embedded_corpus("graph.dataset")
    folder = root / "graphs" / f"calls-{corpus.sha256[:16]}-v{FORMAT}"
    graph = open_graph(folder)
    if graph is not None:
        return graph
    try:
        with locked(folder):
            # Another process may have made it while this one waited.
            return open_graph(folder) or _create(folder, corpus)
    except OSError as error:
        hint = f"cannot write {error.filename or folder} ({error.strerror}); choose another"
        raise ConfigError("data.root", root, hint) from None


def _create(folder: Path, corpus: Corpus) -> GraphFolder:
    texts = {name: corpus.text(name) for name in corpus.files}
    origin = {"name": "calls", "source": "sympy", "corpus_sha256": corpus.sha256}
    return create(folder, lambda aside: fill(aside, "sympy", texts), origin)


def fill(folder: Path, package: str, texts: Mapping[str, str]) -> dict[str, object]:
    """Write the graph of a package's source; see `tasks.graph.folder.create`.

    Args:
        package: its name.
        texts: the source by its paths within the package, with / as separator.
    """
    program = Program(package, texts)
    functions = program.functions
    pairs = np.array(list(program.calls()), np.int64).reshape(-1, 2)
    edges = [(pairs[:, 0], pairs[:, 1])]
    num_edges = write_rows(folder, edges, len(functions), undirected=True, distinct=True)
    features = (features_of(text) for text in _texts(functions, texts))
    write_array(folder / "features.bin", (row[None] for row in features), np.float32)
    names, labels = _labels(functions)
    write_array(folder / "labels.bin", [labels], LABEL)
    parts = np.array([_part(function) for function in functions])
    counts = {
        name: write_array(
            folder / f"{name}.bin", [np.flatnonzero((parts == name) & (labels >= 0))], np.int64
        )
        for name in PARTS
    }
    return {
        "nodes": len(functions),
        "edges": num_edges,
        "features": FEATURES,
        "classes": len(names),
        "class_names": names,
        "parts": counts,
        "types": {"features": "float32", "neighbours": "int32"},
    }


def features_of(text: str) -> np.ndarray:
    """The hashed words of a text, float32 [FEATURES], of norm 1 (or 0, without words)."""
    row = np.zeros(FEATURES, np.float32)
    for word, count in Counter(_words(text)).items():
        digest = zlib.crc32(word.encode())  # Python's own hash differs from process to process
        row[digest % FEATURES] += (1 if digest >> 31 else -1) * count**0.5
    norm = float(np.linalg.norm(row))
    return row / norm if norm else row


def _words(text: str) -> Iterator[str]:
    for found in _WORD.finditer(_DOTTED.sub(" ", text)):
        word = found[0].lower()
        if len(word) > 1 and word not in _EMPTY:
            yield word


def _texts(functions: list[Function], texts: Mapping[str, str]) -> Iterator[str]:
    """The text of each function, without the lines that import."""
    path, lines = "", list[str]()
    for function in functions:
        if function.path != path:
            # As `ast` numbers lines; str.splitlines ends them at form feeds and others, too.
            path, lines = function.path, re.split(r"\r\n|\r|\n", texts[function.path])
        numbers = range(function.first, function.last + 1)
        own = [lines[at - 1] for at in numbers if at not in function.import_lines]
        yield "\n".join(line for line in own if not _IMPORT.match(line))


def _labels(functions: list[Function]) -> tuple[list[str], np.ndarray]:
    """The names of the classes, ascending, and the class of each function; -1 for none."""
    packages = [path.partition("/")[0] if "/" in (path := one.path) else "" for one in functions]
    counts = Counter(packages)
    names = sorted(name for name in counts if name and counts[name] >= FEWEST)
    number = {name: at for at, name in enumerate(names)}
    return names, np.array([number.get(package, -1) for package in packages], LABEL)


def _part(function: Function) -> str:
    """The part of a function; overloads of one name go to the same."""
    digest = hashlib.blake2b(function.qualified.encode(), digest_size=8, key=b"graphs/calls")
    place = int.from_bytes(digest.digest(), "little") % 100
    for name, share in _SHARES.items():
        if place < share:
            return name
        place -= share
    raise AssertionError("the shares are of 100")
