"""A wrong hyper-parameter is refused at once, by its name."""

from typing import Any

import pytest

from co2.errors import ConfigError
from co2.methods import METHODS
from tests.methods.driver import ADAM, SETTINGS

NAN, INF = float("nan"), float("inf")
ROUNDS = ("local_sgd", "slowmo", "overlap_local_sgd", "cocod_sgd", "co2")
WRONG: list[tuple[str, str, Any]] = [
    *((name, "tau", value) for name in ROUNDS for value in (0, -3)),
    *(
        (name, "outer_momentum", value)
        for name in ("slowmo", "overlap_local_sgd", "co2")
        for value in (1.0, 1.5, -0.1, NAN)
    ),
    *((name, "outer_lr", value) for name in ("slowmo", "co2") for value in (-1.0, NAN, INF)),
    *(("overlap_local_sgd", "pull", value) for value in (-0.1, 1.1, NAN)),
    *(("co2", "clip", value) for value in (-1.0, NAN)),
    *(("co2", "gap_penalty", value) for value in ("typo", 0.0, -2.0, NAN)),
    ("co2", "clip_mode", "typo"),
    *((name, "freeze_step", value) for name in ADAM for value in (0, -1)),
    *(("zero_one_adam", key, 0) for key in ("kappa", "double_every", "max_interval")),
]
RIGHT: list[tuple[str, str, Any]] = [
    *((name, "tau", 1) for name in ROUNDS),
    *((name, "outer_momentum", 0.0) for name in ("slowmo", "overlap_local_sgd", "co2")),
    *(("co2", "clip", value) for value in (None, 0.0, 5.0)),
    *(
        ("co2", "gap_penalty", value)
        for value in ("none", "gap_aware", "gap_aware_elementwise", 2.0)
    ),
    *(("co2", "clip_mode", value) for value in ("value", "norm")),
]


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        METHODS[name].Config(**{**SETTINGS[name], key: value})
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}={value}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "key", "value"), RIGHT)
def test_accepted(name: str, key: str, value: Any) -> None:
    assert getattr(METHODS[name].Config(**{**SETTINGS[name], key: value}), key) == value


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_right(name: str) -> None:
    METHODS[name].Config()
