"""The benchmark that trains all replicas as one: its arithmetic is the methods'."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks import replicas_on_one_gpu
from benchmarks.batched import BETAS, CLIP_NORM, WEIGHT_DECAY, Decoder
from benchmarks.replicas_on_one_gpu import (
    Clock,
    Configuration,
    Settings,
    Trainings,
    measure,
)
from tasks.text.gpt2 import transformer
from tests.reference import REFERENCES
from tests.reference.replica import Replica, mean

SETTINGS = Settings(
    width=8,
    layers=2,
    heads=2,
    vocab=7,
    context=5,
    batch=12,
    rounds=(3, 5),
    tau=3,
    replicas=(1, 3),
    shares=(0.0, 0.4),
    lr=0.02,
    warmup_steps=4,
)
KNOBS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "local_sgd": {"tau": 3},
    "co2": {"tau": 3, "outer_lr": 1.0, "outer_momentum": 0.2, "gap_penalty": "gap_aware_steady"},
    "co2_keep": {
        "tau": 3,
        "fragments": 1,
        "keep_local": 0.75,
        "momentum_weight": 0.15,
        "outer_momentum": 0.9,
    },
}
"""Of the references: what benchmarks/batched.py has."""


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Text, validation windows and initial weights in fp64."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(SETTINGS.vocab, (400,), generator=generator)
    validation = torch.randint(SETTINGS.vocab, (70, 6), generator=generator)
    return text, validation, SETTINGS.model().start(0).double()


class Model(nn.Module):
    """One replica's own copy."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(start.clone())


def simulated(one: Configuration, total: int) -> float:
    """The loss after a training by the method's reference, from its first step."""
    text, validation, start = problem()
    model = SETTINGS.model()
    starts = Trainings(SETTINGS, [one], text, start).starts

    def replica(rank: int) -> Replica:
        own = Model(start)

        def backward(model_: nn.Module, step: int) -> None:
            places = starts[step].view(one.replicas, -1)[rank]
            windows = text[places[:, None] + torch.arange(6)]
            model.losses(own.weights[None], windows[None]).sum().backward()
            nn.utils.clip_grad_norm_(own.parameters(), CLIP_NORM)

        def set_lr(optimizer: Optimizer, step: int) -> None:
            optimizer.param_groups[0]["lr"] = SETTINGS.learning_rate(step, total)

        optimizer = AdamW(own.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)
        return Replica(own, optimizer, backward, set_lr, total * SETTINGS.tau)

    replicas = [replica(rank) for rank in range(one.replicas)]
    knobs = KNOBS[one.method] | ({"blocking_share": one.share} if one.share else {})
    rounds = REFERENCES[one.method](replicas, **knobs)
    consensus = None
    while replicas[0].steps_done < total * SETTINGS.tau:
        consensus = next(rounds)
    if consensus is None:
        consensus = mean(replica.weights() for replica in replicas)
    return model.losses(consensus[None], validation[None]).item()


@pytest.fixture(scope="module")
def losses() -> replicas_on_one_gpu.Losses:
    clock = Clock(1e9, 10**9)
    found = measure(SETTINGS, *problem(), clock)
    assert clock.done == sum(map(SETTINGS.work, SETTINGS.shares))
    assert len({round(loss, 7) for loss in found.values()}) == len(found) == len(CASES) * 2
    return found


CASES = [one for share in SETTINGS.shares for one in SETTINGS.configurations(share)]


@pytest.mark.parametrize("total", SETTINGS.rounds)
@pytest.mark.parametrize("one", CASES, ids=str)
def test_a_branch_is_the_whole_training(
    losses: replicas_on_one_gpu.Losses, one: Configuration, total: int
) -> None:
    assert losses[one, total] == pytest.approx(simulated(one, total), rel=1e-10)


def test_the_decoder_is_gpt2() -> None:
    """Without biases and scales: transformers' own with zeros and ones there."""
    model = Decoder(vocab=11, context=6, width=8, layers=2, heads=2)
    weights = torch.stack([model.start(seed).double() for seed in (0, 1)])
    windows = torch.randint(11, (2, 3, 7), generator=torch.Generator().manual_seed(2))
    expected = []
    for row, batch in zip(weights, windows, strict=True):
        gpt2 = transformer(11, 6, (2, 2, 8), 0.0).double()
        matrices = (p for p in gpt2.parameters() if p.dim() == 2)
        with torch.no_grad():
            for matrix, part in zip(matrices, row.split(model.sizes), strict=True):
                matrix.copy_(part.view_as(matrix))
        logits = gpt2(input_ids=batch[:, :-1]).logits
        expected.append(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
    torch.testing.assert_close(model.losses(weights, windows), torch.stack(expected))


def test_the_rate_warms_up_stays_and_decays() -> None:
    settings = replace(SETTINGS, lr=1.0)  # τ = 3, 4 steps of warm-up
    trunk = [settings.learning_rate(step, None) for step in range(6)]
    assert trunk == [0.25, 0.5, 0.75, 1, 1, 1]
    branch = [settings.learning_rate(step, 5) for step in range(15)]
    assert branch[:12] == [0.25, 0.5, 0.75, *[1] * 9]
    assert branch[12:] == pytest.approx([1, 2 / 3, 1 / 3])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(512, (500,), generator=generator)
    windows = torch.randint(512, (20, 17), generator=generator)
    monkeypatch.setattr(replicas_on_one_gpu, "embedded_text", lambda settings: (text, windows))
    words = ["--smoke", "--width", "8", "--rounds", "2", "1", "--out", str(tmp_path)]
    replicas_on_one_gpu.main(words)
    (page,) = tmp_path.iterdir()
    assert page.name == "replicas_on_one_gpu_smoke.md"
    shown = page.read_text()
    assert "not run" not in shown and "| co2_keep | 16 | 0.4 |" in shown
    with pytest.raises(SystemExit, match="2"):
        replicas_on_one_gpu.main([*words, "--batch", "24"])
