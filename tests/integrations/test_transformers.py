"""SyncTrainer: it trains as one's own loop does, goes on exactly, and shows the consensus."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import co2
from co2.methods import METHODS
from tests.integrations.replicas import BLOCKING, Weights, called, held, method, refusal
from tests.methods.driver import inner

pytestmark = [
    pytest.mark.slow,  # imports seconds of another library
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate"),
]

STEPS = 12
"""Four rounds; one epoch and a half of two replicas."""


def language(dropout: float = 0.0) -> Any:
    """A small GPT-2. Any: of transformers, which costs seconds."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": 17, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    shape |= {"bos_token_id": 0, "eos_token_id": 0}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**shape, **drops))


def texts(count: int) -> list[dict[str, Tensor]]:
    """Numbers that follow each other, from a start that differs."""
    lines = [(torch.arange(8) + start * start) % 17 for start in range(count)]
    return [{"input_ids": line, "labels": line} for line in lines]


def trainer(sync: co2.Method, folder: str, dropout: float = 0.0, **more: Any) -> Any:
    from transformers import TrainingArguments

    from co2.integrations.transformers import SyncTrainer

    class Recording(SyncTrainer):
        """Keeps the batches of this replica, and the losses that it logs."""

        def training_step(self, model: Any, inputs: Any, count: Any = None) -> Tensor:
            batch = {name: value.clone() for name, value in inputs.items()}
            self.batches.append({**batch, "num_items_in_batch": count})
            return super().training_step(model, inputs, count)

    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": STEPS}
    settings |= {"learning_rate": 0.02, "max_grad_norm": 0.5}
    settings |= {"logging_steps": 1, "save_strategy": "no"}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3}
    arguments = TrainingArguments(folder, **{**settings, **quiet, **more})
    data = {"train_dataset": texts(64), "eval_dataset": texts(24)}
    made = Recording(language(dropout), arguments, **data, sync=sync)
    made.batches = []
    return made


def losses(made: Any, key: str = "loss") -> dict[int, float]:
    return {line["step"]: line[key] for line in made.state.log_history if key in line}


def both_ways(folder: str, name: str) -> tuple[Weights, Weights]:
    """Final weights by SyncTrainer, and of the same batches in a loop of one's own."""
    registered = name.partition(",")[0]
    optim = "adamw_torch" if inner(registered) == "adamw" else "sgd"
    counts = {"average_tokens_across_devices": not METHODS[registered].averages_gradients}
    made = trainer(method(name), folder, optim=optim, **counts)
    made.train()
    model, sync = language(), method(name)
    kind: Any = torch.optim.AdamW if inner(registered) == "adamw" else torch.optim.SGD
    # In Trainer's groups: what is sent at once has one scale where signs are sent.
    first = made.get_decay_parameter_names(model)
    named = sorted(model.named_parameters(), key=lambda one: one[0] not in first)
    optimizer = kind([p for _, p in named], lr=0.02, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)
    mesh = co2.Mesh.world(device="cpu")
    wrapped = sync.prepare(model, optimizer, mesh, total_steps=STEPS)
    for batch in made.batches:
        wrapped(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        sync.step()
        rate.step()
        optimizer.zero_grad()
    with sync.consensus():
        final = held(model)
    sync.flush()
    return held(made.model), final


def every_method(folder: str) -> dict[str, tuple[Weights, Weights]]:
    return {name: both_ways(folder, name) for name in (*METHODS, BLOCKING)}


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Weights, Weights]]]:
    return called(every_method, tmp_path_factory.mktemp("ways"), 2)


@pytest.mark.parametrize("name", [*METHODS, BLOCKING])
def test_it_is_ones_own_loop(ways: list[dict[str, tuple[Weights, Weights]]], name: str) -> None:
    """Clipped, with a rate that falls; every process ends with the consensus."""
    start = held(language())
    for found in ways:
        by_trainer, by_hand = found[name]
        torch.testing.assert_close(by_trainer, by_hand, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(by_trainer, ways[0][name][0], rtol=0, atol=0)
    moved = by_trainer["transformer.wte.weight"] - start["transformer.wte.weight"]
    assert moved.abs().max() > 1e-3


NAMES = ("co2", "slowmo", "streaming_diloco", "allreduce")


def interrupted(folder: str) -> dict[str, Any]:
    """Of each method: weights and losses of a whole training, and of one that goes on at 5."""
    found = {}
    more = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 5}
    for name in NAMES:
        whole = trainer(method(name), f"{folder}/{name}", dropout=0.2, **more)
        whole.train()
        again = trainer(method(name), f"{folder}/{name}", dropout=0.2, **more)
        again.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-5")
        found[name] = [(held(one.model), losses(one)) for one in (whole, again)]
    return found


def test_it_goes_on_exactly(tmp_path: Path) -> None:
    """From amid a round, with dropout, accumulation, and an epoch that ends later."""
    for found in called(interrupted, tmp_path, 2):
        for name in NAMES:
            (weights, told), (others, theirs) = found[name]
            torch.testing.assert_close(weights, others, rtol=0, atol=0, msg=name)
            assert all(told[step] == theirs[step] for step in range(6, STEPS + 1)), name


def evaluated(folder: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    each: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
    each |= {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}
    found: dict[str, Any] = {}
    for name, more in (("often", each), ("never", {})):
        made = trainer(method("co2"), f"{folder}/{name}", **more)
        made.train()
        found[name] = held(made.model)
        if name == "often":
            found["told"] = losses(made, "eval_loss")
            found["after"] = made.evaluate()["eval_loss"]
            saved = AutoModelForCausalLM.from_pretrained(f"{folder}/often/checkpoint-{STEPS}")
            found["saved"] = held(saved)
            # Once more, from where the first has ended.
            made.train()
            found["again"] = made.evaluate()["eval_loss"]
    return found


def test_it_shows_the_consensus(tmp_path: Path) -> None:
    one, other = called(evaluated, tmp_path, 2)
    assert one["told"] == other["told"] and len(one["told"]) == STEPS
    assert one["after"] == one["told"][STEPS], "what is left is what was evaluated last"
    assert one["again"] < one["after"] < one["told"][1]
    for found in (one, other):
        torch.testing.assert_close(found["often"], found["never"], rtol=0, atol=0)
        torch.testing.assert_close(found["saved"], one["often"], rtol=0, atol=0)


def refused(folder: str) -> list[str]:
    """The lines of what cannot be trained."""
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer

    from co2.integrations.transformers import SyncTrainer

    made = trainer(method("co2"), folder, save_strategy="steps", save_steps=STEPS)
    made.train()
    arguments = made.args
    assert isinstance(made, Trainer)
    wrapped = DistributedDataParallel(language())
    lines = [
        refusal(lambda: SyncTrainer(model, arguments, sync=sync))  # noqa: B023
        for model, sync in ((language(), "co2"), (language(), made.sync), (wrapped, method("co2")))
    ]
    arguments.auto_find_batch_size = True
    lines.append(refusal(lambda: SyncTrainer(language(), arguments, sync=method("co2"))))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    mesh = co2.Mesh.world(device="cpu")
    lines.append(refusal(lambda: method("co2").prepare(wrapped, optimizer, mesh)))
    path = incomplete(folder, made)
    again = trainer(method("co2"), folder)
    return [*lines, refusal(lambda: again.train(resume_from_checkpoint=path))]


def incomplete(folder: str, made: Any) -> str:
    """A checkpoint as Trainer alone writes it."""
    place = f"{folder}/checkpoint-{STEPS}"
    Path(place, f"sync_{made.args.process_index}.pt").unlink()
    return place


def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    for lines in called(refused, tmp_path, 2):
        words = ("sync=str: must be", "sync=CO2: has prepared", "is wrapped already")
        words += ("auto_find_batch_size=True", "is wrapped already", "there is no sync_")
        assert all(word in line for word, line in zip(words, lines, strict=True)), lines
