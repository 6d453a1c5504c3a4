"""What tests take: durations.csv, by which `make test-fast` leaves out the long ones.

    python -m tests.durations                       # all that `make test` runs
    python -m tests.durations tests/engine -n 3     # some of them

runs tests and writes how long each function took in all its cases, in seconds, if that is long. Do
so on a quiet machine. A test that is not in the file counts as quick.
"""

import argparse
import csv
import re
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "durations.csv"
LONG_S = 1.0
"""What takes as long is written."""
_SHARED = ("workers",)
"""Fixtures that nearly all tests share: none has to pay for them alone."""


def function(name: str) -> str:
    """The test function of a case."""
    return name.partition("[")[0]


def is_there(name: str) -> bool:
    """Whether a file, class or function of this name is among the tests."""
    path, *parts = function(name).split("::")
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    found = [re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE) for part in parts]
    return bool(text) and all(found)


def read(file: Path = FILE) -> dict[str, float]:
    """Seconds of each long test function."""
    if not file.exists():
        return {}
    with file.open() as lines:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(lines)}


def write(measured: dict[str, float], file: Path = FILE) -> None:
    """Those that were not measured now keep what they have, as long as they are there."""
    known = {name: seconds for name, seconds in read(file).items() if is_there(name)}
    now = {name: round(seconds, 1) for name, seconds in measured.items()}
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["test", "seconds"])
        writer.writerows(pair for pair in sorted((known | now).items()) if pair[1] >= LONG_S)


class Measured:
    """A plugin of pytest, in each of its processes: the first one collects from all and writes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._setups: dict[object, float] = {}
        """By fixture: what its last setup took."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._shared: dict[str, float] = defaultdict(float)
        """By function: what those of its fixtures took that its cases share."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef
    ) -> Generator[None, object, object]:
        began = time.perf_counter()
        made = yield
        self._setups[fixturedef] = time.perf_counter() - began
        return made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A fixture that several functions share counts once for each, because each may be the
        first."""
        report = yield
        if call.when == "call":
            fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
            setups = {"own": 0.0, "shared": 0.0}
            for name, found in fixtures.items():
                for one in found if name not in _SHARED else ():
                    kind = "own" if one.scope == "function" else "shared"
                    setups[kind] += self._setups.get(one, 0.0)
            seconds = call.duration + setups["own"], setups["shared"]
            report.user_properties.append(("seconds", seconds))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            own_s, shared_s = dict(report.user_properties)["seconds"]
            name = function(report.nodeid)
            self._seconds[name] += own_s
            self._shared[name] = max(self._shared[name], shared_s)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            write({name: s + self._shared[name] for name, s in self._seconds.items()}, self._file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="write how long tests took into this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--durations-file")
    if file is not None:
        config.pluginmanager.register(Measured(file.absolute()))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: run tests, and write what they take."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    _, arguments = parser.parse_known_args(argv)
    own = ["-p", "tests.durations", f"--durations-file={FILE}", "-m", "not slow"]
    return int(pytest.main([*own, *arguments]))


if __name__ == "__main__":
    sys.exit(main())
