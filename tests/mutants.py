"""How many faults the tests find: small faults are put into the code, one at a time, and each is
given to the tests that reach its place, which one run of all tests with probes has found.

    python -m tests.mutants --sample 300 --seed 0

takes one or two hours, so each result is written to results/mutants.csv at once; the same command
goes on with what is missing there: delete that file once the code has changed. `--show` prints the
survivors and the shares. A fault is one of: a comparison flipped, a constant off by one, a
statement removed, an argument dropped. Faults go into copies of the last commit, never into this
tree.

mutmut and cosmic-ray were not used: both run the tests in their own process or with the package of
the environment, and these tests start processes that import the code anew.
"""

import argparse
import ast
import csv
import functools
import hashlib
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "mutants.csv"
ROOMS = {
    "co2/methods": "tests/methods",
    "co2/comm": "tests/engine",
    "co2/train": "tests/cli",
    "tasks": "tests/tasks",
}
"""Where faults are put. All these tests are asked, those of its own folder first."""
GOLDEN = "tests/recipes/test_golden.py"
"""Is asked as well: a change of what a task trains is one of its losses."""
MOST_S = 90
"""The tests that a fault is given take so long at most, on a machine that does nothing else."""
KINDS = ("comparison", "constant", "statement", "argument")
HANGS_S = 120
"""A test of this length has hung: the longest takes a quarter of it on a quiet machine."""
_MARK, _REACH = "CO2_MUTANT", "CO2_MUTANTS_REACH"
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
    reached_by: int
    seconds: int
    commit: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every fault that can be put into a file."""
    source = path.read_bytes()
    starts = _starts(source)

    def fault(kind: str, old: ast.expr | ast.stmt, new: str) -> Mutant:
        return Mutant(str(path.relative_to(ROOT)), old.lineno, kind, *_span(old, starts), new)

    for node in _code(ast.parse(source)):
        if _is("comparison", node):
            assert isinstance(node, ast.Compare)
            flipped = ast.Compare(node.left, [_FLIPPED[type(node.ops[0])]()], node.comparators)
            yield fault("comparison", node, f"({ast.unparse(flipped)})")
        elif _is("constant", node):
            assert isinstance(node, ast.Constant)
            yield fault("constant", node, repr(node.value + 1))
        elif _is("argument", node):
            assert isinstance(node, ast.Call)
            args, keywords = node.args, node.keywords[:-1]
            if not node.keywords:
                args = args[:-1]
            yield fault("argument", node, ast.unparse(ast.Call(node.func, args, keywords)))
        elif _is("statement", node):
            assert isinstance(node, ast.stmt)
            yield fault("statement", node, "pass")


def _is(kind: str, node: ast.AST) -> bool:
    match node:
        case ast.Compare():
            return kind == "comparison" and len(node.ops) == 1
        case ast.Constant():
            return kind == "constant" and type(node.value) in (int, float)
        case ast.Call():
            return kind == "argument" and bool(node.args or node.keywords)
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Return():
            return kind == "statement"
    return False


def _starts(source: bytes) -> list[int]:
    """The place of each line's first byte."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _span(node: ast.expr | ast.stmt, starts: list[int]) -> tuple[int, int]:
    """The places in the file's bytes where it starts and ends."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = starts[node.lineno - 1] + node.col_offset
    return start, starts[node.end_lineno - 1] + node.end_col_offset


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
        if name in ("annotation", "returns", "decorator_list", "pattern"):
            continue
        if isinstance(node, ast.JoinedStr):
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


class _Probes(ast.NodeTransformer):
    """Has each place of a file that a fault may take tell when it is reached."""

    def __init__(self, source: bytes, numbers: dict[tuple[str, int, int], int]) -> None:
        self.starts = _starts(source)
        self.numbers = numbers  # by kind, start and end

    def visit(self, node: ast.AST) -> Any:
        found = []
        if isinstance(node, (ast.stmt, ast.expr)):
            places = [(kind, *_span(node, self.starts)) for kind in KINDS if _is(kind, node)]
            found = [self.numbers[place] for place in places if place in self.numbers]
        self.generic_visit(node)
        for number in found:
            call = f"__import__('tests.mutants', fromlist=['hit']).hit({number})"
            told = ast.parse(call, mode="eval").body
            if isinstance(node, ast.stmt):
                return [ast.Expr(told), node]
            pair = ast.Tuple([told, node], ast.Load())
            node = ast.Subscript(pair, ast.Constant(1), ast.Load())
        return node


_REACHED: set[tuple[int, int]] = set()


@functools.cache
def _current() -> mmap.mmap:
    """The number of the test that runs, which the session writes and all its processes read."""
    with open(os.environ[_REACH] + ".test", "r+b") as file:
        return mmap.mmap(file.fileno(), 8)


def hit(number: int) -> None:
    """A place is reached: in whatever process of the test that runs."""
    if _REACH not in os.environ:
        return
    place = (int.from_bytes(_current()[:8], "little"), number)
    if place not in _REACHED:
        _REACHED.add(place)
        with open(os.environ[_REACH], "a") as file:
            file.write(f"reached {place[0]} {number}\n")


_NUMBERS: dict[str, int] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    """As a plugin of the session that looks for what each test reaches."""
    if _REACH in os.environ:
        _NUMBERS[nodeid] = len(_NUMBERS) + 1
        _current()[:8] = _NUMBERS[nodeid].to_bytes(8, "little")


def pytest_runtest_logreport(report: Any) -> None:
    if _REACH in os.environ and (report.when == "call" or report.failed):
        with open(os.environ[_REACH], "a") as file:
            number = _NUMBERS[report.nodeid]
            file.write(f"test {number} {report.duration:.3f} {report.outcome} {report.nodeid}\n")


def reach(mutants: Sequence[Mutant], folder: str, tree: Path, log: Path) -> None:
    """Write to `log` which tests of a folder reach which places."""
    for path in {mutant.path for mutant in mutants}:
        source = (tree / path).read_bytes()
        numbers = {
            (mutant.kind, mutant.start, mutant.end): number
            for number, mutant in enumerate(mutants)
            if mutant.path == path
        }
        probed = _Probes(source, numbers).visit(ast.parse(source))
        (tree / path).write_text(ast.unparse(ast.fix_missing_locations(probed)))
    part = log.with_suffix(".part")
    part.write_text("")
    Path(f"{part}.test").write_bytes(bytes(8))
    words = ["-p", "tests.mutants", "-m", "not slow", folder]
    status, out = _tested(tree, words, **{_REACH: str(part)}, first=False)
    assert status in (0, 1), out  # 1: the probes are in the way of some test
    print(f"{folder}:", *re.findall(r"^\d+ .*(?:passed|failed).*$", out, re.MULTILINE), flush=True)
    part.rename(log)


@dataclass(frozen=True)
class Log:
    """How long each test of a folder takes, and those that reach each place."""

    seconds: dict[str, float]
    reach: dict[int, set[str]]


def read(log: Path) -> Log:
    """With the tests that failed for the probes, too."""
    tests, reach = {}, defaultdict(set)
    for line in log.read_text().splitlines():
        what, number, *more = line.split(" ", 4)
        if what == "test":
            tests[int(number)] = (float(more[0]), more[2])
        else:
            reach[int(more[0])].add(int(number))
    named = {
        place: {tests[number][1] for number in found if number in tests}
        for place, found in reach.items()
    }
    return Log({name: seconds for seconds, name in tests.values()}, named)


def asked(mutant: Mutant, number: int, logs: dict[str, Log]) -> tuple[list[str], int]:
    """(the tests that a fault is given, how many reach it): those that reach it, then the others of
    their files, since what is computed once is reached in one test only. Where probes say nothing,
    as in what is compiled, the files that name the module come before the others of its folder. The
    shortest of each file comes before the second of each, for tests of one file find alike."""
    own = next(folder for room, folder in ROOMS.items() if mutant.path.startswith(room))
    blind = without_probe(mutant) or not any(number in log.reach for log in logs.values())
    named = {GOLDEN, *_naming(mutant.path)}
    order: list[tuple[bool, int, bool, float, str]] = []
    reach = 0
    for folder, log in logs.items():
        if blind:
            whole = folder in (own, GOLDEN)
            found = {test for test in log.seconds if whole or _file(test) in named}
        else:
            found = log.reach.get(number, set())
            reach += len(found)
        files = {_file(test) for test in found}
        others = {test for test in log.seconds if _file(test) in files} - found
        for tests in (found, others):
            of_file = Counter[str]()
            for seconds, test in sorted((log.seconds[test], test) for test in tests):
                rank = of_file[_file(test)]
                late = _file(test) not in named if blind else tests is others
                order.append((late, rank, folder != own, seconds, test))
                of_file[_file(test)] += 1
    left, given = float(MOST_S), []
    for *_, seconds, test in sorted(order):
        left -= seconds
        if left < 0:
            break
        given.append(test)
    return given, reach


def _file(test: str) -> str:
    return test.partition("::")[0]


@functools.cache
def _naming(path: str) -> set[str]:
    """The files of tests that name a module."""
    name = re.compile(rf"\b{Path(path).stem}\b")
    files = (ROOT / "tests").rglob("test_*.py")
    return {str(file.relative_to(ROOT)) for file in files if name.search(file.read_text())}


def without_probe(mutant: Mutant) -> bool:
    """Whether probes say nothing of its place: what is computed on import is reached in the first
    test of each process, and a GPU's kernel has no room for a probe."""
    source = (ROOT / mutant.path).read_bytes()
    starts = _starts(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            (begin, _), (_, end) = (_span(node.body[at], starts) for at in (0, -1))
            kernel = "triton.jit" in map(ast.unparse, node.decorator_list)
        elif isinstance(node, ast.Lambda):
            (begin, end), kernel = _span(node.body, starts), False
        else:
            continue
        if begin <= mutant.start < end:
            return kernel
    return True


def judge(mutant: Mutant, tests: list[str], tree: Path) -> tuple[str, str]:
    """(outcome, first test that fails) of the fault in a copy of the commit."""
    path = tree / mutant.path
    sound = path.read_bytes()
    path.write_bytes(sound[: mutant.start] + mutant.text.encode() + sound[mutant.end :])
    try:
        status, out = _tested(tree, ["-m", "not slow", *tests]) if tests else (0, "")
    finally:
        path.write_bytes(sound)
    if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "survives", ""
    gone = re.search(r"^ERROR: .*not found: ", out, re.MULTILINE)
    assert gone is None, "a test is gone since .mutants/*.log was written: delete those"
    first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.MULTILINE)
    return "hangs" if "Timeout" in out else "killed", first[1] if first else "every test"


def _tested(tree: Path, words: list[str], first: bool = True, **more: str) -> tuple[int, str]:
    """(exit status, output) of pytest in a copy. `first`: it stops at the first failure."""
    environ = {**os.environ, _MARK: tree.name, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # Two faults of one file within a second would else share what is compiled of it.
    environ |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1", **more}
    limit = [f"--timeout={HANGS_S}", "--timeout-method=thread", *(["-x"] if first else [])]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *limit, *words]
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
            Result(
                **{
                    **row,
                    **{key: int(row[key]) for key in ("line", "start", "reached_by", "seconds")},
                }
            )
            for row in csv.DictReader(file)
        ]


def write(result: Result) -> None:
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)])
        if new:
            writer.writeheader()
        writer.writerow(asdict(result))


def run(mutants: list[Mutant], most: int | None, jobs: int) -> None:
    changed = _git("status", "--porcelain", "--", *ROOMS, "tests")
    assert not changed, f"commit these first, for the copies are of the last commit: {changed}"
    digest = hashlib.sha256(repr(mutants).encode()).hexdigest()[:8]
    logs = {
        folder: ROOT / ".mutants" / f"{digest}-{Path(folder).name}.log"
        for folder in (*ROOMS.values(), GOLDEN)
    }
    with tempfile.TemporaryDirectory(prefix="mutants") as base, ThreadPoolExecutor(jobs) as pool:

        def clone() -> Path:
            tree = Path(tempfile.mkdtemp(dir=base))
            _git("clone", "--quiet", "--shared", str(ROOT), str(tree))
            return tree

        (ROOT / ".mutants").mkdir(exist_ok=True)
        left = [(folder, log) for folder, log in logs.items() if not log.exists()]
        for future in [pool.submit(reach, mutants, folder, clone(), log) for folder, log in left]:
            future.result()
        trees: SimpleQueue[Path] = SimpleQueue()
        for _ in range(jobs):
            trees.put(clone())

        def one(mutant: Mutant, tests: list[str], reach: int) -> None:
            tree, began = trees.get(), time.monotonic()
            outcome, killer = judge(mutant, tests, tree)
            trees.put(tree)
            seconds = round(time.monotonic() - began)
            place = (mutant.path, mutant.line, mutant.kind, mutant.start, mutant.text)
            write(Result(*place, outcome, killer, reach, seconds, commit()))
            name = f"{mutant.path}:{mutant.line} {mutant.kind}"
            print(f"{len(known())}: {name} {outcome} {killer} {seconds} s", flush=True)

        found = {folder: read(log) for folder, log in logs.items()}
        done = {(result.path, result.start, result.text) for result in known()}
        wanted = [
            (mutant, *asked(mutant, number, found))
            for number, mutant in enumerate(mutants)
            if (mutant.path, mutant.start, mutant.text) not in done
        ]
        for future in [pool.submit(one, *each) for each in wanted[:most]]:
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
    run(sample(args.sample, args.seed), args.only, args.jobs)
    show(known())


if __name__ == "__main__":
    main()
