"""docs/add-a-task.md is complete: what stands there trains, under more than one method."""

import re
import shutil
from pathlib import Path

import pytest

import train
from co2.app.application import App
from tasks import TASKS
from tests.cli.harness import ROOT, configured, metrics, run_folder


@pytest.fixture
def sine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "add-a-task.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    files = re.findall(r"## \d\. `conf/(\S+)`.*?```yaml\n(.*?)```", page, re.DOTALL)
    assert len(files) == 1
    namespace: dict = {"__name__": "sine"}
    exec(compile(code, "sine.py", "exec"), namespace)
    monkeypatch.setitem(TASKS, "sine", namespace["Sine"])
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name, text in files:
        (tmp_path / "conf" / name).write_text(text)
    monkeypatch.setattr(train, "APP", App(tmp_path / "conf", TASKS))


@pytest.mark.usefixtures("sine")
@pytest.mark.parametrize(
    ("method", "most"), [("allreduce", 0.05), ("local_sgd", 0.05), ("co2", 0.3)]
)
def test_the_page_trains(tmp_path: Path, method: str, most: float) -> None:
    runs = tmp_path / "runs"
    config = configured("task=sine", f"method={method}", "launch.workers=1", runs=runs)
    train.APP.work(config)
    last = metrics(run_folder(config), "eval")[-1]
    assert last["step"] == 600 and last["loss"] < most


@pytest.mark.usefixtures("sine")
def test_a_wrong_value_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^sine\.samples=0: must be"):
        configured("task=sine", "sine.samples=0", runs=tmp_path)
