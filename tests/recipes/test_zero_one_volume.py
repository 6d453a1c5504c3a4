"""What Adam sends over a schedule, against sets of steps that are written out."""

import pytest

from recipes.signs.zero_one_volume import (
    BITS,
    KAPPA,
    LONGEST,
    TRAININGS,
    Training,
    allreduce,
    onebit_adam,
    zero_one_adam_,
)
from tests.reference.zero_one_adam import exchanges, refreshes


def halving(step: int) -> float:
    return 0.5 ** (step // 100)


def test_a_training_by_hand() -> None:
    training = Training(400, 60, 40, halving, "made up")
    assert allreduce(training).bits == 16 * 400
    assert onebit_adam(training).bits == 16 * 60 + 340
    sent = zero_one_adam_(training)
    # 100 steps of interval 1, then 2, 4 and 8; refreshes at 0 to 16, then at 18, 20 … 38.
    assert sent.rounds == 100 + 50 + 25 + 13
    assert sent.bits == 16 * (17 + 11) + sent.rounds


@pytest.mark.parametrize("name", ["BERT-large", "ImageNet"])
def test_a_published_training_is_the_union_of_its_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.reference.zero_one_adam.HORIZON", 30_000)
    training = TRAININGS[name]
    short = Training(20_000, training.freeze_step, 9_000, training.lr, "")
    due_v = refreshes(short.warmup, KAPPA)
    due_u = [t for t in exchanges(short.warmup, 10**9, LONGEST) if t < short.steps]
    sent = zero_one_adam_(short)
    assert set(due_v) <= set(due_u)
    assert sent.rounds == len(due_u)  # up to here no rate has halved
    assert sent.bits == BITS * len(due_v) + len(due_u)
