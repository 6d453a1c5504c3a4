"""Runs of the laboratory that were never made."""

import json
from pathlib import Path

from co2_measure.lab.trial import trial_folder
from recipes.runs import laboratory
from recipes.runs.laboratory import LabCell


def write_run(of: LabCell, throughput: float) -> Path:
    """A training's folder, as the laboratory leaves it."""
    run = trial_folder(of.trial, laboratory.EVEN, of._runs)
    folder = run / "gpt2" / of.config().method / of.trial.method / "seed0"
    folder.mkdir(parents=True)
    summary = {"throughput": throughput, "exposed_share": 0.5, "overlap": 0.5}
    (folder / "summary.json").write_text(json.dumps({**summary, "workers": 2, "steps": 60}))
    machine = {"cpu": "another cpu", "cores": 4, "gpus": []}
    manifest = {"git": {"commit": "f" * 40, "dirty": False}, "hardware": machine}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
