"""torchtitan's SyncTrainer: it trains as one's own loop does, goes on exactly, and shows the
consensus."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import co2
from tests.integrations import titan
from tests.integrations.replicas import Weights, called, method, refusal

pytestmark = [
    pytest.mark.slow,  # imports seconds of another library
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan"),
]

STEPS = 7
"""Two rounds and one step."""
NAMES = ("co2", "local_sgd", "allreduce")


def by_hand(name: str, made: Any, start: Weights, rates: list[float]) -> Weights:
    """Final weights of a loop of one's own, in which every worker has the whole model, and takes
    all samples of its replica."""
    mesh, sync = co2.Mesh.world(2, device="cpu"), method(name)
    model = made.model_spec.model.build()
    model.init_weights(buffer_device=None)
    model.load_state_dict(start)
    kind = made.optimizer.param_groups[0].optimizer_kwargs
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    wrapped = sync.prepare(model, optimizer, mesh, total_steps=STEPS)
    shards = made.parallelism.data_parallel_shard_degree
    ranks = [shards * mesh.replica + shard for shard in range(shards)]
    if sync.averages_gradients:  # by DistributedDataParallel, over all
        ranks = [mesh.worker]
    drawn = [titan.batches(rank, 2 * shards, STEPS) for rank in ranks]
    for rate, *parts in zip(rates, *drawn, strict=True):
        inputs, labels = (torch.cat(one) for one in zip(*parts, strict=True))
        positions = torch.arange(titan.LENGTH).expand_as(inputs)
        masks = model.get_attention_masks(positions=positions)
        logits = wrapped(inputs, attention_masks=masks, positions=positions)
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        sync.step()
        optimizer.zero_grad()
    with sync.consensus():
        final = titan.whole(model)
    sync.flush()
    return final


def both_ways(folder: str, name: str, **degrees: int) -> tuple[Weights, Weights, Weights]:
    """Weights at first, those of SyncTrainer, and those of the same batches in one's own loop."""
    made = titan.trainer(titan.config(f"{folder}/{name}", STEPS, **degrees), method(name))
    start, rates = titan.whole(made.module), []
    step = made.train_step

    def train_step(data: Any) -> None:
        rates.append(made.optimizers.param_groups[0]["lr"])
        step(data)

    made.train_step = train_step
    made.train()
    made.close()
    final = titan.whole(made.module)
    return start, final, by_hand(name, titan.config(folder, STEPS, **degrees), start, rates)


def trained(
    folder: str, names: tuple[str, ...], degrees: dict[str, int]
) -> dict[str, tuple[Weights, Weights, Weights]]:
    titan.on_cpus()
    return {name: both_ways(folder, name, **degrees) for name in names}


@pytest.mark.parametrize(
    ("names", "degrees"), [(NAMES, {"shard": 2}), (("co2",), {"shard": 1, "tensor": 2})]
)
def test_it_is_ones_own_loop(
    tmp_path: Path, names: tuple[str, ...], degrees: dict[str, int]
) -> None:
    """Two replicas of two workers, by FSDP2 and by tensor parallelism: clipped, with a rate that
    changes."""
    ways = called(trained, tmp_path, 4, names, degrees)
    for found in ways:
        for name, (start, by_trainer, by_hand) in found.items():
            torch.testing.assert_close(by_trainer, by_hand, rtol=1e-4, atol=1e-5, msg=name)
            torch.testing.assert_close(by_trainer, ways[0][name][1], rtol=0, atol=0, msg=name)
            key = "layers.0.attention.wo.weight"
            assert (by_trainer[key] - start[key]).abs().max() > 1e-3


def interrupted(folder: str, name: str) -> tuple[Any, ...]:
    """Weights of a whole training, of one that goes on at 5, and of the last checkpoint; moments of
    the checkpoint at 5, and those of this worker."""
    titan.on_cpus()
    from torch.distributed import checkpoint

    saving = {"enable": True, "interval": 5, "last_save_model_only": True}
    weights = []
    for load_step in (-1, 5):
        made = titan.config(folder, STEPS, **saving, load_step=load_step)
        one = titan.trainer(made, method(name))
        one.train()
        one.close()
        assert one.step == STEPS
        weights.append(titan.whole(one.module))
    last = {key: torch.empty_like(value) for key, value in weights[0].items()}
    checkpoint.load(last, checkpoint_id=f"{folder}/checkpoint/step-{STEPS}", no_dist=True)
    shape = weights[0]["layers.0.attention.wo.weight"].shape
    key = "state.layers.0.attention.wo.weight.exp_avg_sq"
    saved = {f"optimizer.{key}": torch.empty(shape)}
    checkpoint.load(saved, checkpoint_id=f"{folder}/checkpoint/step-5", no_dist=True)
    own = torch.load(f"{folder}/checkpoint/step-5/sync_{one.mesh.worker}.pt")
    return *weights, last, *saved.values(), own["optimizer"][key]


@pytest.mark.parametrize("name", ["co2", "allreduce"])
def test_it_goes_on_exactly(tmp_path: Path, name: str) -> None:
    """From amid a round. torchtitan's own checkpoint is of the consensus."""
    ways = called(interrupted, tmp_path, 4, name)
    for one, again, last, *_ in ways:
        torch.testing.assert_close(one, again, rtol=0, atol=0)
        torch.testing.assert_close(last, one, rtol=0, atol=0)
    first, second = (torch.cat([ways[2 * r + s][4] for s in range(2)]) for r in range(2))
    torch.testing.assert_close(ways[0][3], (first + second) / 2, rtol=0, atol=0)
    assert torch.equal(first, second) == (name == "allreduce")


def evaluated(folder: str) -> dict[str, Any]:
    """Losses in validation, and weights with it and without."""
    titan.on_cpus()
    from dataclasses import replace

    found: dict[str, Any] = {"told": []}
    for freq in (1, None):
        made = titan.config(folder, STEPS)
        if freq is not None:
            options = {"enable": True, "freq": 1, "steps": 2, "dataloader": made.dataloader}
            made.validator = replace(made.validator, **options)
        one = titan.trainer(made, method("co2"))
        if freq is not None:
            one.metrics_processor.log_validation = lambda loss, **_: found["told"].append(loss)
        one.train()
        one.close()
        found[str(freq)] = titan.whole(one.module)
    return found


def test_it_shows_the_consensus(tmp_path: Path) -> None:
    ways = called(evaluated, tmp_path, 4)
    for found in ways:
        assert len(found["told"]) == STEPS and found["told"] == ways[0]["told"]
        torch.testing.assert_close(found["1"], found["None"], rtol=0, atol=0)


def refused(folder: str) -> list[str]:
    """The lines of what cannot be trained."""
    titan.on_cpus()
    from dataclasses import replace

    made = titan.config(folder, STEPS)
    pipeline, three = (
        replace(made.parallelism, **{f"{way}_degree": degree})
        for way, degree in (("pipeline_parallel", 2), ("data_parallel_replicate", 3))
    )
    lines = [
        refusal(lambda: titan.trainer(given, sync))  # noqa: B023
        for sync, given in (
            ("co2", made),
            (method("co2"), replace(made, training=replace(made.training, global_batch_size=7))),
            (method("co2"), replace(made, parallelism=pipeline)),
            (method("co2"), replace(made, parallelism=three)),
            (method("demo"), made),
        )
    ]
    saving = {"enable": True, "interval": 1, "last_save_model_only": False}
    one = titan.trainer(titan.config(folder, 1, **saving), method("local_sgd"))
    one.train()
    one.close()
    two = titan.config(folder, 2, **saving)
    return [*lines, refusal(lambda: titan.trainer(two, method("co2")).train())]


def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    words = ("sync=str: must be", "global_batch_size=7: must be a multiple of the 2 replicas")
    words += ("pipeline_parallel_degree=2", "replicate_degree=3: must divide 4", "sync=demo")
    words += ("the state was saved by local_sgd",)
    for lines in called(refused, tmp_path, 4):
        assert all(word in line for word, line in zip(words, lines, strict=True)), lines
