"""The published recipes: their batch, epochs and warm-up, on any number of workers."""

import pytest

from co2.config import Config
from co2.errors import ConfigError
from recipes.recipe import NODE, Recipe
from recipes.registry import RECIPES
from recipes.runs import slurm
from recipes.runs.cells import TrainCell, composed_config
from tests.cli.harness import tasks_at

WORKERS = (1, 2, 4, 8, 16, 32, 64)
PUBLISHED = {
    "resnet50": (8192, 1_281_167, 90, 5),
    "vit": (1024, 1_281_167, 300, 5),
    "shapenet": (128, 41_952, 300, 10),
    "glue": (32, 392_702, 10, 0.6),
    "graph": (1024, 1_207_179, 50, 0),
    # With a batch in place of a data set, epochs are steps.
    "ade20k": (16, 16, 160_000, 0),
    "gpt2": (480, 480, 600_000, 2_000),
    "moe": (480, 480, 600_000, 2_000),
    "roberta": (4096, 4096, 23_000, 1_380),
    "transnormer": (480, 480, 100_000, 2_000),
}
"""By task: samples of a step, samples of the data set, epochs, epochs of warm-up."""
TOKENS = {"gpt2": 295e9, "moe": 295e9, "transnormer": 49e9, "roberta": 12e9}
OVERRIDES = {
    **{("glue", workers): 32 // workers for workers in (16, 32)},
    **{("shapenet", workers): 128 // workers for workers in (16, 32, 64)},
    **{("graph", workers): 1024 // workers for workers in (16, 32, 64)},
    **{("ade20k", workers): 16 // workers for workers in (8, 16)},
}
"""Workers with which the micro-batch has to be smaller: its largest size."""
TOO_MANY = {(task, 64) for task in ("glue", "ade20k", "gpt2", "moe", "transnormer")} | {
    ("ade20k", 32)
}
"""Workers among which the batch cannot be divided."""


def on(task: str, workers: int, *more: str) -> Config:
    words = [f"task={task}", "scale=paper", f"launch.workers={workers}", *more]
    if task == "transnormer" and workers < 8:  # whose replicas are of eight
        words += ["mesh.replica_size=1", "mesh.strategy=ddp"]
    return composed_config(tuple(words))


@pytest.mark.parametrize("task", tasks_at("paper"))
def test_a_published_recipe(task: str) -> None:
    batch, samples, epochs, warmup = PUBLISHED[task]
    config = on(task, 8 if task == "transnormer" else 4)
    trained = config.train.steps * config.train.global_batch
    assert config.train.global_batch == batch
    assert trained / samples == pytest.approx(epochs, rel=1e-3)
    share = config.optim.warmup_steps / config.train.steps
    assert share == pytest.approx(warmup / epochs, rel=1e-3)
    if task in TOKENS:
        assert trained * config.task_config.context == pytest.approx(TOKENS[task], rel=5e-3)


def test_robertas_own_recipe() -> None:
    config = composed_config(("task=roberta", "scale=liu", "launch.workers=8"))
    assert config.train.global_batch == 8192
    assert (config.train.steps, config.optim.warmup_steps) == (500_000, 24_000)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("task", PUBLISHED)
def test_its_batch_is_the_same_on_any_number_of_workers(task: str, workers: int) -> None:
    batch, *_ = PUBLISHED[task]
    more = []
    if (task, workers) in OVERRIDES or (task, workers) in TOO_MANY:
        with pytest.raises(ConfigError) as caught:
            on(task, workers)
        assert caught.value.key == "train.global_batch"
        if (task, workers) in TOO_MANY:
            assert "or train.global_batch=" in str(caught.value) and batch % workers
            return
        more.append(f"train.batch_size={OVERRIDES[task, workers]}")
        assert str(caught.value).endswith(f", or {more[0]}")
        if more == ["train.batch_size=1"] and task == "ade20k":
            return  # whose batch norm needs two
    train = on(task, workers, *more).train
    assert train.batch_size * train.accumulate * workers == batch == train.global_batch


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("task", PUBLISHED)
def test_one_gpu_and_four_train_alike(task: str, workers: int) -> None:
    words = (f"task={task}", "scale=gpu", f"launch.workers={workers}")
    more = ("train.batch_size=256",) if task == "graph" else ()
    train, alone = (composed_config((*one, *more)).train for one in (words, words[:2]))
    assert alone.batch_size * alone.accumulate == alone.global_batch
    assert train.batch_size * train.accumulate * workers == alone.global_batch


@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES.values() if "paper" in recipe.scales],
    ids=lambda recipe: recipe.name,
)
def test_a_job_has_replicas_to_synchronize(recipe: Recipe) -> None:
    """One replica of the 7B model fills a node, so its jobs have several."""
    for column in recipe.columns:
        cell = recipe.cell(recipe.rows[0], column, "paper", 0)
        if type(cell) is not TrainCell:
            continue  # the laboratory's, and those that one job makes
        config = cell.config()
        assert config.launch.workers >= 2 * config.mesh.replica_size, column.name
        options = dict(word.removeprefix("--").split("=") for word in slurm.options(cell))
        nodes, of_node = int(options["nodes"]), int(options["ntasks-per-node"])
        assert of_node <= NODE and nodes * of_node == config.launch.workers
