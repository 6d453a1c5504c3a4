"""Every example's own commands run where nothing but the extra that it names is installed; the
notebook runs from its first cell to its last, in a kernel, as a person runs it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.harness import LIMIT_S, ROOT, held_port
from tests.installed import build_wheel, install
from tests.server import environment

SLOW = pytest.mark.slow  # starts interpreters

EXTRAS = {
    "own_loop.py": "",
    "two_machines.sh": "",
    "hf_trainer.py": "transformers",
    "accelerate_loop.py": "transformers",
    "lightning_trainer.py": "lightning",
}
"""On SLURM: tests/slurm/test_jobs.py. torchtitan's needs GPUs."""
COMMAND = re.compile(r"^#? {0,5}((?:torchrun|python|accelerate|bash) .*)$", re.MULTILINE)


def test_none_is_forgotten() -> None:
    names = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert names == {*EXTRAS, "slurm.sbatch", "torchtitan_llama.py", "compare_methods.ipynb"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module", params=["", "transformers", "lightning"])
def place(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """An extra, and the `bin` of an environment that has it."""
    folder = tmp_path_factory.mktemp(request.param or "plain")
    return request.param, install(wheel, folder, request.param).parent


def commands(name: str) -> list[str]:
    """Those in the head of an example that need no GPU and no files."""
    head = (ROOT / "examples" / name).read_text().partition("import")[0]
    found = [line for line in COMMAND.findall(head) if "MODEL" not in line]
    return [line for line in found if "--multi_gpu" not in line]


@SLOW
def test_they_run(place: tuple[str, Path], tmp_path: Path) -> None:
    extra, programs = place
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    env |= {"PATH": f"{programs}:{env['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    for name in (name for name, its in EXTRAS.items() if its == extra):
        lines = commands(name)
        assert lines, name
        together = name == "two_machines.sh"
        for group in [lines] if together else [[line] for line in lines]:
            text = said(group, tmp_path, env)
            alone = lines[0] in group and name == "own_loop.py"
            assert re.findall(r"replicas: (\d+)", text) == ["1" if alone else "2"]
            (loss,) = map(float, re.findall(r"last loss ([\d.]+)", text))
            assert loss < (4.0 if name == "hf_trainer.py" else 1.0)  # 5.5 and 8 at the start


def said(lines: list[str], cwd: Path, env: dict[str, str]) -> str:
    """The output of commands, which run at the same time."""
    running = []
    with held_port() as port:
        for number, line in enumerate(lines):
            words = line.replace("10.0.0.1", "127.0.0.1").split()
            words += [port] if words[0] == "bash" else []
            with (cwd / f"log{number}").open("w") as log:
                own = {**env, "PET_MASTER_PORT": port}
                running.append(subprocess.Popen(words, cwd=cwd, env=own, stdout=log, stderr=log))
        statuses = [process.wait(LIMIT_S) for process in running]
    text = "\n".join((cwd / f"log{number}").read_text() for number in range(len(lines)))
    assert statuses == [0] * len(lines), text
    return text


NOTEBOOK = ROOT / "examples" / "compare_methods.ipynb"


@SLOW
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    client = nbclient.NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4),
        timeout=600,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    client.execute(env={**environment(), "PYTHONPATH": str(ROOT)})
    *_, run, plot, _ = client.nb.cells
    text = "".join(out["text"] for out in run.outputs if out.output_type == "stream")
    lines = re.findall(r"^(.*?) +test loss ([\d.]+) after 480 steps and +([\d.]+) MB", text, re.M)
    losses = {name: float(loss) for name, loss, _ in lines}
    sent = {name: float(megabytes) for name, _, megabytes in lines}
    assert list(losses) == ["AllReduce", "Local SGD, τ = 12", "CO2, τ = 12"], text
    assert max(losses.values()) < 0.5  # 2.3 at the start
    assert sent["AllReduce"] == pytest.approx(12 * sent["CO2, τ = 12"], rel=0.01)
    assert any("image/png" in out.get("data", {}) for out in plot.outputs)
