"""What `python train.py --help` prints: the groups, then every key with its meaning."""

import ast
import inspect
import itertools
import json
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping

from co2.app.compose import Values
from co2.app.schema import PLAIN, schema, words
from co2.config import NODES, Config

HEAD = """\
usage: python train.py [-m] [GROUP=OPTION ...] [KEY=VALUE ...]
       python train.py --help [GROUP=OPTION ...]

Train one task under one way of keeping the replicas in step. With -m, commas stand between several
values of a key, and every combination is trained. --cfg job prints a configuration.
"""
GROUPS = {
    "task": "what is trained",
    "method": "how the replicas are kept in step",
    "scale": "size of model and data, and the recipe",
    "tuned": "true: the settings that won in python -m recipes tune (true, false)",
    "experiment": "a worked example, which may choose all of the above",
    "debug": "two steps in this process, without saving, deterministic",
    "hydra/launcher": "with -m: one run after the other, or jobs of SLURM (basic, submitit_slurm)",
    "hydra/sweeper": "with -m: every combination, or a search (basic, optuna)",
}


def help_text(
    values: Values,
    tasks: Mapping[str, type],
    methods: Mapping[str, type],
    files: Mapping[str, Iterable[str]],
) -> str:
    """The help for one choice of groups, of which `values` are composed; `files` are the options of
    groups that conf has as files."""
    options = {"task": tasks, "method": methods, **files}
    lines = [HEAD, "Groups, with what is chosen here:", ""]
    for group, purpose in GROUPS.items():
        if group in options:
            purpose += f" ({', '.join(sorted(options[group]))})"
        default = "basic" if group.startswith("hydra/") else None
        chosen = json.dumps(values.get(group, default)).strip('"')
        lines += [f"{group}={chosen}", _lines(f"    {purpose}")]
    lines += ["", "Keys, with their values at this choice:", ""]
    plain = {name: kind for name, kind in PLAIN.items() if name not in GROUPS}
    lines += _keys(Config, plain, values, "")
    task, method = values["task"], values["method"]
    own = {task: schema(tasks[task]), method: schema(methods[method])}
    for node, kind in (NODES | own).items():
        lines += _keys(kind, typing.get_type_hints(kind), values[node], f"{node}.")
    return "\n".join(lines)


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
        yield _lines(f"{node}{name}={text}  ({words(kind)})")
        yield _lines(f"    {meanings[name]}")


def _lines(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="    ", break_on_hyphens=False)
