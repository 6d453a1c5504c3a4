"""One job of a sweep, by its number."""

import pytest

from co2.app.compose import sweep_job
from co2.errors import ConfigError

SWEEP = ["task=toy", "co2.tau=1,3,6", "train.seed=0,1"]


def test_numbers_are_those_of_multirun() -> None:
    found = [sweep_job(str(index), SWEEP)[1:] for index in range(6)]
    assert found == [[f"co2.tau={t}", f"train.seed={s}"] for t in (1, 3, 6) for s in (0, 1)]
    assert sweep_job("0", ["task=toy"]) == ["task=toy"]


@pytest.mark.parametrize("index", ["6", "-1", "", "one"])
def test_no_such_job(index: str) -> None:
    with pytest.raises(ConfigError, match="0 to 5"):
        sweep_job(index, SWEEP)


def test_overrides_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError):
        sweep_job("0", ["co2.tau=[1"])
