"""The notebook runs from its first cell to its last, in a kernel, as a person runs it."""

import json
import re

import pytest

from tests.cli.harness import ROOT
from tests.server import environment

NOTEBOOK = ROOT / "examples" / "compare_methods.ipynb"


def test_outputs_are_left_out() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.slow  # a minute
def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
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
