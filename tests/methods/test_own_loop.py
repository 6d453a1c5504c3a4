"""What goes wrong in a loop of one's own is refused in one line, under every method: weights that
somebody else writes, calls at a wrong time, files of another run. Then replicas that differ: the
one that does is named, as is one that has gone, or makes other calls than the others."""

import copy
import gc
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

import co2
from co2.comm import deadlocks
from co2.errors import ConfigError, ReplicasDiffer, WorkerLost, WrongCall
from co2.methods import METHODS, Method
from co2.methods.shared import guard
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, assert_same, inner, told, trained
from tests.workers import Pool, everybody, replicas

STEPS = 7


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_is_not_traced() -> Iterator[None]:
    """A refusal has the collector look for methods that have gone, which else takes 0.2 s here."""
    gc.freeze()
    yield
    gc.unfreeze()


# Weights that somebody else writes, moves or trains, and steps of its own.


def load(session: Session) -> None:
    session.net.load_state_dict(trained("co2", rank=1).net.state_dict())


def move(session: Session) -> None:
    """There and back."""
    session.net.double().float()


def unfreeze(session: Session) -> None:
    session.net.frozen.weight.requires_grad_(True)


def freeze(session: Session) -> None:
    session.net.leave.bias.requires_grad_(False)


def add(session: Session) -> None:
    late = nn.Parameter(torch.zeros(3))
    session.net.register_parameter("late", late)
    session.optimizer.add_param_group({"params": [late]})


Act = Callable[[Session], object]
SPOILT: list[tuple[Act, str, type[Exception]]] = [
    (load, "the next mean would undo", WrongCall),
    (move, "was moved, converted or replaced after prepare", WrongCall),
    (unfreeze, "parameter=frozen.weight: was not trained .* before prepare", ConfigError),
    (freeze, "parameter=leave.bias: was trained when prepare was called", ConfigError),
    (add, "parameter=late: was not trained .* before prepare", ConfigError),
    (lambda session: session.method.finish(), r"after finish\(\) or flush\(\)", WrongCall),
    (lambda session: session.method.flush(), r"after finish\(\) or flush\(\)", WrongCall),
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("act", "text", "kind"), SPOILT)
def test_the_next_step_refuses(name: str, act: Act, text: str, kind: type[Exception]) -> None:
    session = trained(name)
    act(session)
    with told(text, kind):
        session.method.step()


@pytest.mark.parametrize(
    ("act", "text", "kind"),
    [
        (move, "place and convert the model first", WrongCall),
        (lambda one: setattr(one.net, "extra", nn.Linear(2, 2)), "extra.weight was", WrongCall),
        (freeze, "parameter=leave.bias: was trained when prepare was called", ConfigError),
        (load, "the next mean would undo", WrongCall),
    ],
)
def test_a_consensus_does_not_show_it(act: Act, text: str, kind: type[Exception]) -> None:
    session = trained("co2")
    act(session)
    with told(text, kind):
        session.shown()


@pytest.mark.parametrize("part", ["the model", "its tensors", "a module", "in place"])
def test_weights_written_before_the_first_step(part: str) -> None:
    session, other = trained("co2", steps=0), trained("co2", rank=1)
    if part in ("the model", "its tensors"):
        session.net.load_state_dict(other.net.state_dict(), assign=part == "its tensors")
    elif part == "a module":
        session.net.enter.load_state_dict(other.net.enter.state_dict())
    else:
        with torch.no_grad():
            next(session.net.parameters()).add_(1)
    for act in (session.shown, session.step):
        with told("" if part == "its tensors" else "load weights first, then call sync.prepare"):
            act()


def test_weights_loaded_amid_training() -> None:
    session = trained("slowmo")
    best = copy.deepcopy(session.net.state_dict())
    session.step()
    live = copy.deepcopy(session.net.state_dict())
    session.net.load_state_dict(best)
    session.net.load_state_dict(live)  # as a moving average is shown
    session.step()
    with session.method.consensus():
        session.net.load_state_dict(best)  # put back at the end
    session.step()
    session.net.load_state_dict(best)
    with told("the next mean would undo"):
        session.step()


@pytest.mark.parametrize("name", METHODS)
def test_a_step_of_the_optimizer_itself(name: str) -> None:
    session = trained(name)
    before = session.snapshot()
    with told(r"outside sync.step\(\)"):
        session.optimizer.step()
    problem.backward(session.model, STEPS, 0)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with told(r"sync.step\(scaler\) in place of scaler.step"):
        scaler.step(session.optimizer)
    after = session.snapshot()
    moved = [key for key in before if not torch.equal(after[key], before[key])]
    assert set(moved) <= {key for key, _ in session.net.named_buffers()}, "no weight has moved"
    session.method.finish()
    session.optimizer.step()  # it is the loop's again


def test_copies_are_nobodys() -> None:
    session = trained("co2")
    net, optimizer = copy.deepcopy((session.net, session.optimizer))
    net.load_state_dict(pickle.loads(pickle.dumps(net)).state_dict())
    optimizer.step()
    session.step()
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with told("cannot be copied or pickled", TypeError):
            act(session.method)
    assert copy.deepcopy(co2.CO2(tau=3)).config.tau == 3


def test_a_method_that_has_gone_leaves_its_optimizer() -> None:
    session = trained("co2")
    net, optimizer = session.net, session.optimizer
    with told("belongs to another method", ConfigError):
        co2.LocalSGD(tau=2).prepare(net, optimizer, co2.Mesh.world())
    del session
    co2.LocalSGD(tau=2).prepare(net, optimizer, co2.Mesh.world())
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])  # which writes without being counted
def test_parameters_of_a_second_optimizer(fused: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (SGD(part.parameters(), lr=0.1, fused=fused) for part in net)
    with told("optimizer=SGD: trains parameters that the model does not have", ConfigError):
        co2.CO2().prepare(net[0], SGD(net.parameters(), lr=0.1), co2.Mesh.world())
    sync = co2.CO2()
    sync.prepare(net, first, co2.Mesh.world())
    net(torch.ones(1, 2)).sum().backward()
    sync.step()
    second.step()
    if not fused:
        with told("1.weight was written, and the method's optimizer does not hold it"):
            sync.step()
    with told("with a method of its own"), sync.consensus():
        pytest.fail("nothing may be shown")


def test_a_step_that_failed_may_be_made_again() -> None:
    session, other = trained("co2"), trained("co2", steps=STEPS + 1)
    problem.set_lr(session.optimizer, STEPS)
    problem.backward(session.model, STEPS, 0)
    with patch.object(SGD, "step", side_effect=MemoryError), pytest.raises(MemoryError):
        session.method.step()
    assert session.method.steps == STEPS
    session.method.step()
    assert_same(session.snapshot(), other.snapshot())


# Gradients that are scaled, sparse, or made beside the prepared module.

SCALED = [name for name in METHODS if not METHODS[name].reads_gradients]


@replicas(2)
@pytest.mark.parametrize(
    "name", [name for name in SCALED if inner(name) == "sgd" and name != "allreduce"]
)
def test_a_scaler_skips_the_local_step(rank: int, name: str) -> None:
    """Whose gradients are infinite in some steps of replica 1: as if its optimizer did not step."""
    found = []
    for with_scaler in (True, False):
        session = trained(name, rank, steps=0)
        scaler = GradScaler("cpu", init_scale=4.0, enabled=with_scaler)
        for step in range(STEPS):
            broken = rank == 1 and step in (2, 5)
            problem.backward(session.model, step, rank)
            scaler.scale(torch.ones(()))
            for param in session.net.parameters():
                if param.grad is not None:
                    param.grad *= torch.inf if broken else scaler.get_scale()
            if with_scaler:
                session.method.step(scaler)
                scaler.update()
            else:
                with patch.object(SGD, "step", (lambda _: None) if broken else SGD.step):
                    session.method.step()
            session.optimizer.zero_grad()
        found.append(session.snapshot())
        session.method.flush()
    mixed, plain = found
    assert all(value.isfinite().all() for value in mixed.values())
    torch.testing.assert_close(mixed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SCALED])
def test_a_method_of_gradients_takes_no_scaler(name: str) -> None:
    session = trained(name)
    with told("works with gradients as they are", ConfigError):
        session.method.step(GradScaler("cpu"))
    session.method.step(GradScaler("cpu", enabled=False))


@replicas(2)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "desloc"])  # Adam refuses
def test_sparse_gradients(rank: int, name: str) -> None:
    """A few steps with sparse gradients, or a refusal."""
    net = nn.Embedding(6, 2, sparse=True)
    make = torch.optim.AdamW if inner(name) == "adamw" else SGD
    settings = SETTINGS[name] | ({"fragments": 1} if name == "streaming_diloco" else {})
    sync = METHODS[name](**settings)
    model = sync.prepare(net, make(net.parameters(), lr=0.1), co2.Mesh.world())
    for _ in range(4):
        sync.optimizer.zero_grad()
        model(torch.tensor([rank, 2])).sum().backward()
        if METHODS[name].reads_gradients:
            with told("parameter=weight: has a sparse gradient; ", ConfigError):
                sync.step()
        else:
            sync.step()
    with sync.consensus():
        pass
    sync.flush()


@replicas(2)
def test_a_forward_pass_beside_the_prepared_module(rank: int) -> None:
    session = trained("allreduce", rank)
    problem.backward(session.net, STEPS, rank)
    with told("model = sync.prepare"):
        session.method.step()


@replicas(2)
def test_an_evaluation_through_the_prepared_module_is_no_forward_pass(rank: int) -> None:
    session = trained("allreduce", rank)
    with torch.no_grad():
        session.model(torch.ones(3, 5, dtype=session.net.scale.dtype))
    problem.backward(session.net, STEPS, rank)
    with told("model = sync.prepare"):
        session.method.step()


@pytest.mark.parametrize("name", grid(METHODS, (*OF_A_KIND, "demo").__contains__))
def test_a_step_inside_autocast(name: str) -> None:
    """Rounds nothing of the method."""
    session = trained(name, steps=0)
    for step in range(STEPS):
        problem.set_lr(session.optimizer, step)
        problem.backward(session.model, step, 0)
        with torch.autocast("cpu", torch.bfloat16):
            session.method.step()
        session.optimizer.zero_grad()
    assert_same(session.snapshot(), trained(name).snapshot())


# Wrong calls.


@pytest.mark.parametrize(
    ("settings", "key", "value", "text"),
    [
        ({}, "clip", 0.5, "config.clip=0.5: was None when prepare was called"),
        ({"tau": 3}, "tau", 4, "config.tau=4: was 3 when prepare was called"),
    ],
)
def test_settings_that_change_amid_training(
    settings: dict[str, object], key: str, value: object, text: str
) -> None:
    net = nn.Linear(2, 1)
    sync = co2.CO2(**settings)
    sync.prepare(net, SGD(net.parameters(), lr=0.1), co2.Mesh.world())
    sync.step()
    setattr(sync.config, key, value)
    with told(text, ConfigError):
        sync.step()


def test_settings_that_are_wrong_by_the_time_of_prepare() -> None:
    net, sync = nn.Linear(2, 1), co2.CO2()
    sync.config.tau = 0
    with told("tau=0: must be", ConfigError):
        sync.prepare(net, SGD(net.parameters(), lr=0.1), co2.Mesh.world())


@pytest.mark.parametrize(
    "name", ["step", "flush", "finish", "state_dict", "save", "resume", "consensus", "prepare"]
)
def test_calls_at_a_wrong_time(name: str, tmp_path: Path) -> None:
    session = trained("co2")
    arguments: tuple[object, ...] = (tmp_path,) if name in ("save", "resume") else ()
    if name == "prepare":
        with told("prepare came a second time"):
            session.method.prepare(session.net, session.optimizer, co2.Mesh.world())
        return
    with told(r"came before prepare: call prepare\(model, optimizer, mesh\)"):
        result = getattr(co2.CO2(), name)(*arguments)
        if name == "consensus":
            result.__enter__()
    if name != "consensus":
        with session.method.consensus(), told(r"inside consensus\(\)"):
            getattr(session.method, name)(*arguments)


def prepare(**other: object) -> None:
    net = nn.Linear(2, 1)
    given = {"model": net, "optimizer": SGD(net.parameters(), lr=0.1), "mesh": co2.Mesh.world()}
    co2.CO2().prepare(**{**given, **other})  # type: ignore[arg-type]


FOREIGN = SGD(nn.Linear(2, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: prepare(model=FOREIGN), "model=SGD: must be the model"),
        (lambda: prepare(optimizer=None), "optimizer=NoneType: must be one torch.optim.Optimizer"),
        (lambda: prepare(optimizer=[FOREIGN]), "optimizer=list: must be one"),
        (lambda: prepare(optimizer=FOREIGN), "optimizer=SGD: trains no parameter of the model"),
        (lambda: prepare(mesh=None), "mesh=NoneType: must be a mesh"),
        (lambda: co2.CO2(12), r"config=12: must be a CO2.Config; give CO2\(tau=12\)"),
        (lambda: co2.CO2({"tau": 12}), "must be a CO2.Config"),
        (lambda: co2.CO2(co2.LocalSGD.Config()), "must be a CO2.Config"),
        (lambda: co2.CO2(co2.CO2.Config(), tau=12), "must be a CO2.Config"),
        (lambda: co2.CO2(tua=12), "tua=12: CO2 has no such key; did you mean tau?"),
        (lambda: co2.CO2(co2.CO2.Config(), {"dtype": "bf16"}), "must be a co2.CommConfig"),
    ],
)
def test_wrong_arguments(act: Callable[[], Method | None], text: str) -> None:
    with told(text, ConfigError):
        act()


# The end, and going on.


@replicas(2)
def test_a_forgotten_end_is_told(rank: int) -> None:
    said: list[str] = []

    def say(text: str, **_: object) -> None:
        said.append(text)

    ends: list[Callable[[Session], object]] = [
        lambda session: session.method.finish(),
        lambda session: session.method.flush(),
        lambda session: session.method.consensus_state_dict(),
        lambda session: None,
    ]
    with patch.object(guard, "print", say, create=True):
        for end in ends:
            session = trained("local_sgd", rank, steps=6)
            end(session)
            assert not said
            del session
            gc.collect()
    (text,) = said
    assert "ended 6 steps after its last consensus and without sync.finish()" in text


@replicas(2)
@pytest.mark.parametrize("name", METHODS)
def test_the_consensus_is_shown_once(rank: int, name: str, tmp_path: Path) -> None:
    """Inside itself and after the end the model holds it already. A round has just ended."""
    session = trained(name, rank, steps=6)
    with session.method.consensus():
        shown = copy.deepcopy(session.net.state_dict())
        again = session.method.consensus_state_dict()
    session.method.finish()
    for found in (again, session.net.state_dict(), session.method.consensus_state_dict()):
        assert_same(found, shown)
    session.method.finish()
    assert_same(session.net.state_dict(), shown)
    for call in ("save", "state_dict", "resume"):
        with told(r"came after finish\(\)"):
            getattr(session.method, call)(*([] if call == "state_dict" else [tmp_path]))


@replicas(2)
@pytest.mark.parametrize(
    "name",
    grid([name for name in METHODS if not METHODS[name].equal_weights], OF_A_KIND.__contains__),
)
def test_the_consensus_of_what_no_optimizer_trains(rank: int, name: str) -> None:
    """It averages frozen weights that replicas have written, and leaves alone what is equal: the
    sum of two masks would be infinite."""
    session = trained(name, rank, steps=5)
    mask = torch.full((2, 2), torch.finfo(torch.float32).min).triu(1)
    session.net.register_buffer("mask", mask.clone())
    before = session.net.frozen.weight.detach().clone()
    with torch.no_grad():
        session.net.frozen.weight += rank
        session.net.frozen.bias += 1
    bias = session.net.frozen.bias.clone()
    session.method.finish()
    torch.testing.assert_close(session.net.frozen.weight.detach(), before + 0.5)
    assert torch.equal(session.net.frozen.bias, bias)
    assert torch.equal(session.net.get_buffer("mask"), mask)


@replicas(2)
@pytest.mark.parametrize("name", METHODS)
def test_finish_leaves_the_consensus_on_all(rank: int, name: str) -> None:
    session = trained(name, rank)
    shown = session.method.consensus_state_dict()
    session.method.finish()
    for left in everybody(session.snapshot()):
        for key, value in shown.items():
            assert not value.is_floating_point() or torch.equal(value, left[key])


@replicas(2)
@pytest.mark.parametrize("name", grid(METHODS, OF_A_KIND.__contains__))
def test_resume_is_exact(rank: int, name: str, tmp_path: Path) -> None:
    """And leaves files of one step alone."""
    whole, session = trained(name, rank, steps=0), trained(name, rank, steps=0)
    assert whole.method.resume(tmp_path) is session.method.resume(tmp_path) is None
    session.train(3).method.save(tmp_path, {"rank": -1})
    session.train(1).method.save(tmp_path, {"rank": rank})
    session.method.flush()
    dist.barrier()
    names = [f"step4_worker{worker}of2.pt" for worker in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names, "older ones are deleted"
    again = trained(name, 7 + rank, steps=0)
    assert again.method.resume(tmp_path) == {"rank": rank}
    assert again.method.steps == 4
    again.rank, again.steps_done = rank, 4
    assert_same(again.train(STEPS - 4).snapshot(), whole.train(STEPS).snapshot())


def saved(rank: int, world: int, folder: Path) -> None:
    session = trained("slowmo", rank, steps=4)
    session.method.save(folder)
    session.method.flush()


def loaded(rank: int, world: int, folder: Path, how: str) -> str:
    """Natural attempts to do by hand what `resume` does."""
    session = trained("slowmo", rank, steps=0)
    net, optimizer, sync = session.net, session.optimizer, session.method
    try:
        if how == "resume":
            sync.resume(folder)
            return "nothing"
        state = torch.load(folder / f"step4_worker{0 if how == 'of 0' else rank}of2.pt")
        if how == "before prepare":
            net, optimizer = copy.deepcopy((net, optimizer))
            sync = co2.SlowMo(**SETTINGS["slowmo"])
        net.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        if how == "before prepare":
            sync.prepare(net, optimizer, co2.Mesh.world())
        if how == "forgotten":
            session.step()
        sync.load_state_dict(state["sync"])
    except (ConfigError, WrongCall) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "world", "text"),
    [
        ("resume", 3, "is of 2 workers, not of 3; start as many"),
        ("forgotten", 2, "the model's weights were written after prepare"),
        ("of 0", 2, "this is worker 1 of 2; load on each what it saved itself"),
        ("before prepare", 2, "the model holds others; after prepare load model"),
    ],
)
def test_wrong_ways_to_go_on(
    workers: Pool, how: str, world: int, text: str, tmp_path: Path
) -> None:
    workers.run(saved, 2, tmp_path)
    assert text in workers.run(loaded, world, tmp_path, how)[-1]


def test_files_that_cannot_be_gone_on_from(tmp_path: Path) -> None:
    session = trained("co2")
    with told("must be a dict of tensors, numbers, texts", ConfigError):
        session.method.save(tmp_path, {"scheduler": object})
    session.method.save(tmp_path)
    with told("came after 7 steps"):
        session.method.resume(tmp_path)
    other = Session(0, "co2", SETTINGS["co2"], optimizer="adamw", dtype=torch.float32)
    with told("is of another optimizer than this AdamW", ConfigError):
        other.method.resume(tmp_path)
    net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    sync = co2.CO2(**SETTINGS["co2"])
    groups = [{"params": list(part.parameters())} for part in (*net, nn.ParameterList())]
    sync.prepare(net, type(session.optimizer)(groups, lr=0.1), co2.Mesh.world())
    with told("is of another model: 0.bias differs", ConfigError):
        sync.resume(tmp_path)
    other = trained("co2", steps=0)
    groups = other.optimizer.param_groups
    for group in groups:
        group["params"].reverse()
    with told(
        "trained enter.weight where group 0 of this optimizer has scale; freeze", ConfigError
    ):
        other.method.resume(tmp_path)
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    with told("cannot be read", ConfigError):
        trained("co2", steps=0).method.resume(tmp_path)


@replicas(2)
@pytest.mark.parametrize("name", ["co2", "cocod_sgd"])
def test_going_back_while_a_mean_is_under_way(rank: int, name: str) -> None:
    """Replica 1 is late with the mean that is under way as both go back."""
    session = trained(name, rank, steps=5)
    kept = session.save()
    for _ in range(3):
        if rank == 1:
            time.sleep(0.3)
        session.step()
    whole = session.snapshot()
    session.load(kept, 5)
    assert_same(session.train(3).snapshot(), whole)
    session.method.flush()


# Replicas that differ.


def told_of_others(text: str) -> AbstractContextManager[None]:
    return told(re.escape(text), ReplicasDiffer)


ALIKE = " of replica 1 differs from that of replica 0, and must be equal on all: 0 has "


@replicas(2)
@pytest.mark.parametrize(
    ("tau", "width", "backward", "text"),
    [
        (5, 1, False, f"local_sgd.tau{ALIKE}4, 1 has 5; start all with the same code and settings"),
        (4, 2, False, f"0.weight{ALIKE}(1, 8) of float32, 1 has (2, 8) of float32"),
        (4, 1, True, f"trained parameters of group 0{ALIKE}"),
    ],
    ids=["settings", "shapes", "order"],
)
def test_they_differ_from_the_start(
    rank: int, tau: int, width: int, backward: bool, text: str
) -> None:
    net = nn.Sequential(nn.Linear(8, width if rank else 1))
    params = list(net.parameters())
    optimizer = SGD(params[::-1] if backward and rank else params, lr=0.1)
    with told_of_others(text):
        co2.LocalSGD(tau=tau if rank else 4).prepare(net, optimizer, co2.Mesh.world())


@replicas(2)
def test_only_one_optimizer_has_a_state(rank: int) -> None:
    """As when replica 0 alone loads a checkpoint."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    if rank == 0:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with told_of_others(f"optimizer.state of group 0{ALIKE}state of 2 parameters, step 1, 1 has"):
        co2.CO2().prepare(net, optimizer, co2.Mesh.world())


@replicas(2)
def test_a_buffer_that_has_grown_on_one(rank: int) -> None:
    """As one that follows the longest batch."""
    session = trained("co2", rank)
    session.net.register_buffer("mask", torch.ones(3 + rank))
    with told_of_others(f"mask{ALIKE}(3,) of float32, 1 has (4,) of float32; what the model"):
        session.shown()


@replicas()
@pytest.mark.parametrize(
    ("name", "world", "who"),
    [
        *grid([(name, 3, 1) for name in SETTINGS], lambda case: case[0] in OF_A_KIND),
        ("local_sgd", 3, 0),
        ("local_sgd", 2, 1),
    ],
)
def test_the_replica_that_differs_is_named(rank: int, world: int, name: str, who: int) -> None:
    """In each tensor in turn the last bit of one element differs, which is put back."""
    session = trained(name, rank)
    for key, tensor in session.method.replicated_tensors().items():
        session.shown()
        before = session.snapshot()
        bits = tensor.view(torch.int32)
        bits[-1] ^= int(rank == who)
        usual = 1 if who == 0 else 0
        with told_of_others(f"{key} of replica {who} differs from that of replica {usual},"):
            session.shown()
        bits[-1] ^= int(rank == who)
        assert_same(session.snapshot(), before)
    session.method.flush()


@replicas(2)
def test_rates_that_differ_under_allreduce(rank: int) -> None:
    session = trained("allreduce", rank)
    for group in session.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + rank)
    problem.backward(session.model, 7, rank)
    session.method.step()
    with told_of_others("give all the same learning rates"):
        session.shown()


# Calls that others do not make.


@replicas(2)
@pytest.mark.parametrize("name", ["acco", "co2", "sparta"])
def test_one_step_more(rank: int, name: str) -> None:
    with told_of_others(f"steps{ALIKE[: ALIKE.index(': 0')]}: give every replica as many batches"):
        trained(name, rank, steps=6 + rank).shown()


@replicas(2)
def test_other_calls(rank: int, tmp_path: Path) -> None:
    session = trained("noloco", rank)
    with told_of_others("every replica must make the same calls in the same order"):
        session.method.save(tmp_path) if rank else session.method.finish()


def unequal(mesh: co2.Mesh, name: str, more: int, alone: bool) -> str:
    """Replica 1 makes more steps before the consensus, or never enters it."""
    deadlocks.LOOK_S = 0.2
    rank = mesh.replica
    try:
        session = trained(name, rank, steps=6 + more * rank)
        if not (alone and rank == 1):
            session.shown()
        session.train(30)
    except (ReplicasDiffer, WorkerLost, WrongCall) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


ROUNDS = [(name, *late) for name in ("local_sgd", "co2", "noloco", "streaming_diloco")
          for late in ((9, False), (0, True))]  # fmt: skip


# In processes of their own: what is pending would hold up the end of a process group.
@pytest.mark.parametrize(
    ("name", "more", "alone"),
    grid(ROUNDS, lambda case: case in (("local_sgd", 9, False), ("co2", 0, True))),
)
def test_a_mean_or_a_consensus_that_others_never_join(name: str, more: int, alone: bool) -> None:
    for text in co2.run(unequal, name, more, alone):
        assert text.startswith(
            "WrongCall: replica 0 is in consensus(), finish(), save() or resume() after 6 steps, "
            "replica 1 waits for the mean of step"
        )
        assert "every replica must make these calls" in text


def left_alone(mesh: co2.Mesh) -> str:
    session = trained("local_sgd", mesh.replica, steps=3)
    if mesh.replica == 1:
        os._exit(0)
    with suppress(WorkerLost):
        session.method.finish()
    return "nothing"


def test_a_replica_that_has_gone() -> None:
    """The starter tells of the one that has gone; the other ends at once, too."""
    with pytest.raises(WorkerLost, match="replica 1 was killed, or ended by itself"):
        co2.run(left_alone)


@replicas(2)
def test_who_waits_in_the_consensus_says_so(rank: int) -> None:
    """Replica 1 comes only once replica 0 has said that it waits."""
    store, said = dist.distributed_c10d._get_default_store(), []

    def say(text: str, **_: object) -> None:
        said.append(text)
        store.set("told", "")

    with patch.object(deadlocks, "LOOK_S", 0.1), patch.object(deadlocks, "NOTICE_S", 0.3):
        session = trained("local_sgd", rank, steps=3)
        if rank == 1:
            store.wait(["told"])
        with patch.object(deadlocks, "print", say, create=True), session.method.consensus():
            pass
    assert len(said) == 1 - rank and all("every replica must" in text for text in said)
