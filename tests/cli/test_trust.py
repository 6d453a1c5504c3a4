"""No file is loaded in a way that could run what is in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import train

ROOT = Path(train.__file__).parent
SOURCES = [
    ROOT / "train.py",
    *(p for d in ("co2", "tasks", "recipes") for p in (ROOT / d).rglob("*.py")),
]

# Module and function; the argument that makes it safe, or None where nothing does.
LOADERS: dict[str, tuple[str, object] | None] = {
    "torch.load": ("weights_only", True),
    "timm.models.load_state_dict": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    **dict.fromkeys(
        (
            *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
            *("shelve.open", "dill.load", "dill.loads", "joblib.load", "cloudpickle.load"),
            *("cloudpickle.loads", "pandas.read_pickle", "torch.jit.load"),
            *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
            *("eval", "exec", "__import__", "runpy.run_path", "os.system", "os.popen"),
            *("hydra.utils.instantiate", "hydra.utils.call"),
            "torch.distributed.checkpoint.FileSystemReader",
        ),
        None,
    ),
}


def names(tree: ast.AST) -> dict[str, str]:
    """What a name in a module stands for: `np` → `numpy`, `load` → `torch.load`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """The full name of what an expression names; empty where it names nothing."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, known)
        return f"{inner}.{node.attr}" if inner else ""
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def unsafe(source: str) -> Iterator[str]:
    """The loaders that a module names, apart from calls with the argument that makes them safe."""
    tree = ast.parse(source)
    known, safe = names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (need := LOADERS.get(dotted(node.func, known))):
            given = {k.arg: k.value for k in node.keywords}
            value = given.get(need[0])
            if isinstance(value, ast.Constant) and value.value is need[1]:
                safe.add(node.func)
        # Whatever is given to torch.load through ** is not seen here, and so not safe.
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and node not in safe:
            name = dotted(node, known)
            if name in LOADERS:
                yield name


def test_no_file_is_loaded_without_care() -> None:
    assert len(SOURCES) > 150
    found = {(p.relative_to(ROOT).as_posix(), n) for p in SOURCES for n in unsafe(p.read_text())}
    assert found == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch\ntorch.load(path, weights_only=False)", "torch.load"),
        ("import torch\ntorch.load(path, weights_only=sure)", "torch.load"),
        ("import torch\ntorch.load(path, **options)", "torch.load"),
        ("from torch import load as read\nread(path)", "torch.load"),
        ("import torch\nreader = torch.load", "torch.load"),
        (
            "from timm.models import load_state_dict\nload_state_dict(path)",
            "timm.models.load_state_dict",
        ),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "numpy.load"),
        ("import numpy as np\nnp.load(path)", "numpy.load"),
        ("import pickle\npickle.load(file)", "pickle.load"),
        ("from pickle import loads\nloads(data)", "pickle.loads"),
        ("import yaml\nyaml.load(text, yaml.Loader)", "yaml.load"),
        ("eval(text)", "eval"),
        ("exec(path.read_text())", "exec"),
        (
            "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader(path)",
            "FileSystemReader",
        ),
    ],
)
def test_what_would_be_found(source: str, name: str) -> None:
    (found,) = unsafe(source)
    assert found.endswith(name)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path, map_location='cpu', weights_only=True)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "model.eval()",
        "import json\njson.load(file)",
    ],
)
def test_what_is_safe(source: str) -> None:
    assert list(unsafe(source)) == []
