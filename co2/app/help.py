"""What `python train.py --help` prints: the groups with their options, then every key with its
value, type and meaning."""

import ast
import inspect
import itertools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from co2.app.compose import Values
from co2.app.schema import PLAIN, schema
from co2.config import NODES, Config
from co2.limits import limits, words

HEAD = """\
usage: python train.py [-m] [GROUP=OPTION ...] [KEY=VALUE ...]
       python train.py --help [GROUP=OPTION ...]

Trains one task under one method of keeping the replicas in step.

  python train.py task=gpt2 method=co2 co2.tau=12
  python train.py -m task=gpt2 co2.tau=3,6,12     a sweep: every combination of the values
  python train.py --help task=vit method=slowmo   the keys and values of another choice
  python train.py task=gpt2 --cfg job             prints the configuration and trains nothing
"""
GROUPS = {
    "task": "what is trained",
    "method": "how the replicas are kept in step",
    "scale": "size of model and data, and how they are trained",
    "tuned": "whether the settings are those that won in python -m recipes tune",
    "experiment": "a worked example, which may choose all of the above",
    "debug": "two steps in this process, without saving, deterministic",
    "hydra/launcher": "where the runs of a sweep (-m) are started",
    "hydra/sweeper": "which runs a sweep (-m) has",
}
_OPTIONS = {
    "tuned": {"false": "No.", "true": "Yes, where conf/tuned has some."},
    "hydra/launcher": {"basic": "Here, one after the other.", "submitit_slurm": "Jobs of SLURM."},
    "hydra/sweeper": {"basic": "Every combination of values.", "optuna": "A search."},
}
_SECTIONS = {
    "train": "steps, batches, precision, evaluation",
    "optim": "the inner optimizer and its learning rate",
    "data": "where samples come from",
    "launch": "workers and their devices; replicas that come and go",
    "comm": "what replicas send each other",
    "mesh": "replicas of several workers",
    "checkpoint": "saving",
    "log": "what is recorded",
}
"""The groups of keys that every run has, in the order in which they are shown."""
_WIDEST, _NARROWEST = 100, 60


def help_text(
    values: Values,
    tasks: Mapping[str, type],
    methods: Mapping[str, type],
    files: Mapping[str, Mapping[str, str]],
) -> str:
    """The help for one choice of groups, of which `values` are composed, for this terminal's width.

    Args:
        files: what each option stands for, of groups that conf has as files.
    """
    own = {"task": _first(tasks), "method": _first(methods), **files}
    lines = [HEAD, "GROUPS, with the option that is chosen here", ""]
    for group, options in (own | _OPTIONS).items():
        default = "basic" if group.startswith("hydra/") else None
        chosen = json.dumps(values.get(group, default)).strip('"')
        lines += [_wrapped(f"{group}={chosen}: {GROUPS[group]}", 4)]
        width = max(map(len, options))
        lines += [_wrapped(f"  {name:{width}}  {options[name]}", width + 4) for name in options]
        lines += [""]
    lines += ["KEYS, as KEY=VALUE  (TYPE), with the values of this choice", "", "the run:"]
    plain = {name: kind for name, kind in PLAIN.items() if name not in GROUPS}
    lines += _keys(Config, plain, values, "")
    task, method = values["task"], values["method"]
    kinds = {name: NODES[name] for name in _SECTIONS}
    kinds |= {task: schema(tasks[task]), method: schema(methods[method])}
    purposes = _SECTIONS | {task: own["task"][task], method: own["method"][method]}
    for node, kind in kinds.items():
        lines += ["", _wrapped(f"{node}: {purposes[node]}", 4)]
        lines += _keys(kind, limits(kind), values[node], f"{node}.")
    return "\n".join(lines)


def described(group: Path) -> dict[str, str]:
    """The options of a folder of `conf`: by name, the first sentence of each file's comment."""
    return {path.stem: _sentence(path.read_text()) for path in sorted(group.glob("*.yaml"))}


def _sentence(text: str) -> str:
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
    words = " ".join(line[2:] for line in comment if not line.startswith("# python "))
    return re.split(r"(?<=\.) +(?=[A-Z])", words)[0]


def _first(kinds: Mapping[str, type]) -> dict[str, str]:
    """By name, the first sentences of the module in which each stands."""
    docs = {name: sys.modules[kinds[name].__module__].__doc__ or "" for name in sorted(kinds)}
    return {name: doc.partition("\n\n")[0].strip() for name, doc in docs.items()}


def sentences(schema: type) -> dict[str, str]:
    """What the fields of a dataclass mean: the docstrings below them, and those of its bases."""
    found = {}
    for kind in reversed(schema.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _keys(schema: type, kinds: Mapping[str, object], values: Values, node: str) -> Iterator[str]:
    """Two lines for each key: its value and type, and its sentence."""
    meanings = sentences(schema)
    for name, kind in kinds.items():
        value = values[name]
        text = value if isinstance(value, str) else json.dumps(value)
        yield _wrapped(f"  {node}{name}={text}  ({words(kind)})", 6)
        yield _wrapped(f"      {meanings[name]}", 6)


def _wrapped(text: str, indent: int) -> str:
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 0)).columns))
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
