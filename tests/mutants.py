"""How many faults the tests find: small faults are put into the code, one at a time, and each is
given to the tests of its room.

    python -m tests.mutants --sample 300 --seed 0

takes hours, so each result is written to results/mutants.csv at once; the same command goes on with
what is missing there. `--show` prints the survivors and the shares. A fault is one of: a comparison
flipped, a constant off by one, a statement removed, an argument dropped. Faults go into copies of
the last commit, never into this tree.

mutmut and cosmic-ray were not used: both run the tests in their own process or with the package of
the environment, and these tests start processes that import the code anew.
"""

import argparse
import ast
import csv
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "mutants.csv"
ROOMS = {
    "co2/methods": ("tests/methods",),
    "co2/comm": ("tests/methods", "tests/engine"),
    "co2/train": ("tests/engine", "tests/cli"),
    "tasks": ("tests/tasks",),
}
"""Where faults are put, and the tests that must find them."""
KINDS = ("comparison", "constant", "statement", "argument")
HANGS_S = 120
"""A test of this length has hung: the longest takes a quarter of it on a quiet machine."""
_MARK = "CO2_MUTANT"
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """A fault. `start` and `end` are places in the file's bytes, which `text` replaces."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Result:
    """What the tests said. `killer` is the first test that failed."""

    path: str
    line: int
    kind: str
    start: int
    text: str
    outcome: str  # killed, hangs, survives
    killer: str
    seconds: int
    commit: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every fault that can be put into a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def fault(kind: str, old: ast.expr | ast.stmt, new: str) -> Mutant:
        assert old.end_lineno is not None and old.end_col_offset is not None
        start = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        return Mutant(str(path.relative_to(ROOT)), old.lineno, kind, start, end, new)

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            flipped = ast.Compare(node.left, [_FLIPPED[type(node.ops[0])]()], node.comparators)
            yield fault("comparison", node, f"({ast.unparse(flipped)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield fault("constant", node, repr(node.value + 1))
        elif isinstance(node, ast.Call) and (node.args or node.keywords):
            args, keywords = node.args, node.keywords[:-1]
            if not node.keywords:
                args = args[:-1]
            yield fault("argument", node, ast.unparse(ast.Call(node.func, args, keywords)))
        elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Return)):
            yield fault("statement", node, "pass")


def _code(node: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """The nodes below one that say what is computed: no annotations, docstrings, texts or imports,
    and statements within functions only, since the lack of another ends the import."""
    if isinstance(node, ast.stmt) and not inside and not isinstance(node, ast.ClassDef):
        inside = isinstance(node, ast.FunctionDef)
        if not inside:
            yield from (found for found in _below(node, inside) if isinstance(found, ast.expr))
            return
    if isinstance(node, (ast.stmt, ast.expr)):
        yield node
    yield from _below(node, inside)


def _below(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        for child in field if isinstance(field, list) else [field]:
            text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not text:
                yield from _code(child, inside)


def sample(size: int, seed: int) -> list[Mutant]:
    """Equally many faults of each kind, drawn from all rooms."""
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found = [mutant for path in files for mutant in mutants_of(path)]
    rng = random.Random(seed)
    drawn = []
    for number, kind in enumerate(KINDS):
        of_kind = [mutant for mutant in found if mutant.kind == kind]
        drawn += rng.sample(of_kind, (size + number) // len(KINDS))
    rng.shuffle(drawn)
    return drawn


def tests_for(mutant: Mutant) -> list[str]:
    """The files of tests of its room: those that are named after its file first, then those that
    name it, then the others, so that the first to fail comes early."""
    room = next(room for room in ROOMS if mutant.path.startswith(room))
    stem = Path(mutant.path).stem
    parts = {stem, Path(mutant.path).parent.name, stem.removesuffix("s")}

    def distance(path: Path) -> tuple[int, int]:
        if any(part in path.stem for part in parts):
            return 0, path.stat().st_size
        named = re.search(rf"\b{stem}\b", path.read_text())
        return (1 if named else 2), path.stat().st_size

    files = [file for folder in ROOMS[room] for file in (ROOT / folder).glob("test_*.py")]
    return [str(file.relative_to(ROOT)) for file in sorted(files, key=distance)]


def judge(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """(outcome, first test that fails) of the fault in a copy of the commit."""
    path = tree / mutant.path
    sound = path.read_bytes()
    path.write_bytes(sound[: mutant.start] + mutant.text.encode() + sound[mutant.end :])
    try:
        for marks in ("not slow and not long", "not slow and long"):
            status, out = _tested(tree, [*tests_for(mutant), "-m", marks])
            if status not in (0, 5):  # 5: none has these marks
                hangs = "Timeout" in out
                first = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
                return "hangs" if hangs else "killed", first[1] if first else "every test"
    finally:
        path.write_bytes(sound)
    return "survives", ""


def _tested(tree: Path, words: list[str]) -> tuple[int, str]:
    """(exit status, output) of pytest in a copy, which stops at the first failure."""
    environ = {**os.environ, _MARK: tree.name, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # Two faults of one file within a second would else share what is compiled of it.
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    limit = [f"--timeout={HANGS_S}", "--timeout-method=thread"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *limit, *words]
    run = subprocess.run(
        command, cwd=tree, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    _end_all(f"{_MARK}={tree.name}".encode())
    return run.returncode, run.stdout


def _end_all(mark: bytes) -> None:
    """Kill what a stopped test has left behind."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or is another user's


@functools.cache
def commit() -> str:
    return _git("rev-parse", "--short=7", "HEAD")


def _git(*words: str) -> str:
    found = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def known() -> list[Result]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return [
            Result(**{**row, **{key: int(row[key]) for key in ("line", "start", "seconds")}})
            for row in csv.DictReader(file)
        ]


def write(result: Result) -> None:
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)])
        if new:
            writer.writeheader()
        writer.writerow(asdict(result))


def run(wanted: list[Mutant], jobs: int) -> None:
    changed = _git("status", "--porcelain", "--", *ROOMS, "tests")
    assert not changed, f"commit these first, for the copies are of the last commit: {changed}"
    with tempfile.TemporaryDirectory(prefix="mutants") as base, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            tree = Path(base) / f"tree{job}-{os.getpid()}"
            _git("clone", "--quiet", "--shared", str(ROOT), str(tree))
            trees.put(tree)

        def one(mutant: Mutant) -> None:
            tree, began = trees.get(), time.monotonic()
            outcome, killer = judge(mutant, tree)
            trees.put(tree)
            seconds = round(time.monotonic() - began)
            place = (mutant.path, mutant.line, mutant.kind, mutant.start, mutant.text)
            write(Result(*place, outcome, killer, seconds, commit()))
            name = f"{mutant.path}:{mutant.line} {mutant.kind}"
            print(f"{len(known())}: {name} {outcome} {killer} {seconds} s", flush=True)

        for future in [pool.submit(one, mutant) for mutant in wanted]:
            future.result()


def show(results: list[Result]) -> None:
    for result in results:
        if result.outcome == "survives":
            print(f"{result.path}:{result.line} {result.kind}: {result.text}")
    for what in ("room", "kind"):
        of = {
            result: next(room for room in ROOMS if result.path.startswith(room))
            if what == "room"
            else result.kind
            for result in results
        }
        every = Counter(of.values())
        alive = Counter(of[result] for result in results if result.outcome == "survives")
        print(*(f"{name}: {n - alive[name]} of {n} found" for name, n in every.items()), sep=", ")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="how many of them to try now")
    parser.add_argument("--show", action="store_true", help="print what is known, and run nothing")
    args = parser.parse_args()
    if args.show:
        return show(known())
    done = {(result.path, result.start, result.text) for result in known()}
    wanted = sample(args.sample, args.seed)
    left = [m for m in wanted if (m.path, m.start, m.text) not in done]
    run(left[: args.only], args.jobs)
    show(known())


if __name__ == "__main__":
    main()
