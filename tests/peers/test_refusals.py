"""What a peer cannot do is one line, before any worker starts."""

from pathlib import Path
from typing import Any

import pytest

from co2.errors import ConfigError
from co2.start import launch, placement
from co2_measure.lab.__main__ import main
from co2_measure.peers import PEERS, base
from tests.cli.harness import configured

MISSING = "needs the extra 'peers': pip install -e '.[peers]'"
FOREIGN = [name for name in PEERS if PEERS[name].package != "torch"]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: name)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", FOREIGN)
def test_without_the_extra(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(f"method={name}", runs=tmp_path)
    assert launch.refuse(caught.value) == 2
    assert capsys.readouterr().err == f"error: method={name}: {MISSING}\n"
    assert main(["--methods", f"none,{name}"]) == 2
    assert capsys.readouterr().err == f"error: method={name}: {MISSING}\n"


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("name", PEERS)
def test_composes_with_the_defaults_of_its_class(name: str, tmp_path: Path) -> None:
    for task in ("toy", "gpt2"):
        config = configured(f"task={task}", f"method={name}", runs=tmp_path)
        assert config.method_config == PEERS[name].Config()
        assert config.method_config.tau == 12


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("launch.workers=1", "launch.workers=1: "),
        ("comm.dtype=bf16", "comm.dtype=bf16: "),
        ("{name}.tau=0", "{name}.tau=0: "),
        ("{name}.tua=3", "{name}.tua=3: unknown key; did you mean {name}.tau?"),
        ("+co2.tau=3", "co2.tau=3"),
    ],
)
def test_wrong_values(name: str, word: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(f"method={name}", word.format(name=name), runs=tmp_path)
    assert str(caught.value).startswith(told.format(name=name))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("all_installed")
def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placement.torch.cuda, "device_count", lambda: 2)
    words: tuple[str, ...] = ("method=torch_post_local_sgd",)
    with pytest.raises(ConfigError, match=r"launch.backend=auto: .* use launch.backend=gloo"):
        configured(*words, "launch.backend=auto", runs=tmp_path)
    configured(*words, "launch.backend=gloo", runs=tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "key"),
    [
        ("torchft_diloco", {"outer_momentum": 1.0}, "outer_momentum"),
        ("torchft_diloco", {"outer_lr": -1.0}, "outer_lr"),
        ("fairscale_slowmo", {"outer_lr": 1.0, "outer_momentum": 0.0}, "outer_momentum"),
        ("fairscale_slowmo", {"outer_momentum": 1.0}, "outer_momentum"),
    ],
)
def test_wrong_fields(name: str, fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PEERS[name].Config(**fields)
    assert caught.value.key == key


def test_fairscale_without_momentum_at_another_rate() -> None:
    PEERS["fairscale_slowmo"].Config(outer_lr=0.9, outer_momentum=0.0)
