"""What goes wrong in a loop of one's own is refused in one line, under every method."""

import copy
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

import co2
from co2.errors import ConfigError, WrongCall
from co2.methods import METHODS, Method
from tests.grids import grid
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, assert_same, inner, told, trained
from tests.workers import Pool, everybody, replicas

STEPS = 7


# Weights that somebody else writes.


@pytest.mark.parametrize("name", METHODS)
def test_weights_loaded_after_prepare(name: str) -> None:
    session, other = trained(name, steps=0), trained(name, rank=1)
    session.net.load_state_dict(other.net.state_dict())
    with told("load weights first, then call sync.prepare"):
        session.step()


@pytest.mark.parametrize("part", ["the model", "a module", "in place"])
def test_weights_written_before_the_first_step(part: str) -> None:
    session, other = trained("co2", steps=0), trained("co2", rank=1)
    if part == "the model":
        session.net.load_state_dict(other.net.state_dict(), assign=True)
    elif part == "a module":
        child, source = next(session.net.children()), next(other.net.children())
        child.load_state_dict(source.state_dict())
    else:
        with torch.no_grad():
            next(session.net.parameters()).add_(1)
    with pytest.raises(WrongCall):
        session.step()


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


# Whose step it is.


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


def test_a_copy_of_model_and_optimizer_is_nobodys() -> None:
    session = trained("co2")
    net, optimizer = copy.deepcopy((session.net, session.optimizer))
    net.load_state_dict(pickle.loads(pickle.dumps(net)).state_dict())
    optimizer.step()
    session.step()


def test_a_method_that_has_gone_leaves_its_optimizer() -> None:
    session = trained("co2")
    net, optimizer = session.net, session.optimizer
    with told("belongs to another method", ConfigError):
        co2.LocalSGD(tau=2).prepare(net, optimizer, co2.Mesh.world())
    del session
    co2.LocalSGD(tau=2).prepare(net, optimizer, co2.Mesh.world())
    optimizer.step()


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


# Where the weights lie.

MOVES: dict[str, Callable[[nn.Module], object]] = {
    "converted": lambda net: net.half(),
    "there and back": lambda net: net.double().float(),
    "data": lambda net: [setattr(p, "data", p.data.clone()) for p in net.parameters()],
}


@pytest.mark.parametrize("name", METHODS)
def test_there_and_back(name: str) -> None:
    session = trained(name)
    MOVES["there and back"](session.net)
    with told("was moved, converted or replaced after prepare"):
        session.step()


@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_was_moved_is_not_shown(move: str) -> None:
    session = trained("co2")
    MOVES[move](session.net)
    with told("place and convert the model first"):
        session.shown()


def test_a_new_layer_is_not_shown() -> None:
    session = trained("co2")
    session.net.extra = nn.Linear(2, 2)
    with told("extra.weight was moved, converted or replaced"):
        session.shown()


# Wrong calls.


def test_prepared_twice() -> None:
    session = trained("co2")
    with told("prepare came a second time"):
        session.method.prepare(session.net, session.optimizer, co2.Mesh.world())


@pytest.mark.parametrize("call", ["step", "flush", "finish", "state_dict", "consensus", "save"])
def test_before_prepare(call: str, tmp_path: Path) -> None:
    arguments = (tmp_path,) if call == "save" else ()
    with told(r"came before prepare: call prepare\(model, optimizer, mesh\)"):
        result = getattr(co2.CO2(), call)(*arguments)
        if call == "consensus":
            with result:
                pass


@pytest.mark.parametrize("call", ["step", "state_dict", "save", "resume", "flush", "finish"])
def test_inside_consensus(call: str, tmp_path: Path) -> None:
    session = trained("co2")
    arguments = (tmp_path,) if call in ("save", "resume") else ()
    with session.method.consensus(), told(r"inside consensus\(\)"):
        getattr(session.method, call)(*arguments)


@pytest.mark.parametrize("call", ["flush", "finish"])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_after_the_end(name: str, call: str) -> None:
    session = trained(name)
    getattr(session.method, call)()
    with told(r"after finish\(\) or flush\(\)"):
        session.step()


def test_copies_of_a_method() -> None:
    session = trained("co2")
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with told("cannot be copied or pickled", TypeError):
            act(session.method)
    assert copy.deepcopy(co2.CO2(tau=3)).config.tau == 3


@pytest.mark.parametrize(
    ("model", "optimizer", "mesh", "text"),
    [
        ("optimizer", "model", "mesh", "model=SGD: must be the model"),
        ("model", "none", "mesh", "optimizer=NoneType: must be one torch.optim.Optimizer"),
        ("model", "list", "mesh", "optimizer=list: must be one torch.optim.Optimizer"),
        ("model", "foreign", "mesh", "optimizer=SGD: trains no parameter of the model"),
        ("model", "optimizer", "none", "mesh=NoneType: must be a mesh"),
    ],
)
def test_arguments_of_prepare(model: str, optimizer: str, mesh: str, text: str) -> None:
    net = nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    foreign = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    things = {"model": net, "optimizer": inner, "mesh": co2.Mesh.world(), "none": None}
    things |= {"list": [inner], "foreign": foreign}
    with told(text, ConfigError):
        co2.CO2().prepare(things[model], things[optimizer], things[mesh])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: co2.CO2(12), r"config=12: must be a CO2.Config; give CO2\(tau=12\)"),
        (lambda: co2.CO2({"tau": 12}), "must be a CO2.Config"),
        (lambda: co2.CO2(co2.LocalSGD.Config()), "must be a CO2.Config"),
        (lambda: co2.CO2(co2.CO2.Config(), tau=12), "must be a CO2.Config"),
        (lambda: co2.CO2(tua=12), "tua=12: CO2 has no such key; did you mean tau?"),
        (lambda: co2.CO2(co2.CO2.Config(), {"dtype": "bf16"}), "must be a co2.CommConfig"),
    ],
)
def test_arguments_of_a_method(make: Callable[[], Method], text: str) -> None:
    with told(text, ConfigError):
        make()


@pytest.mark.parametrize("name", METHODS)
def test_settings_by_name(name: str) -> None:
    kind = METHODS[name]
    assert kind(**SETTINGS[name]).config == kind.Config(**SETTINGS[name])


@replicas(2)
def test_a_forward_pass_beside_the_prepared_module(rank: int) -> None:
    session = trained("allreduce", rank)
    problem.backward(session.net, STEPS, rank)
    with told("model = sync.prepare"):
        session.method.step()


# The end, and going on.


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
@pytest.mark.parametrize("name", METHODS)
def test_resume_is_exact(rank: int, name: str, tmp_path: Path) -> None:
    whole, session = trained(name, rank, steps=0), trained(name, rank, steps=0)
    assert whole.method.resume(tmp_path) is session.method.resume(tmp_path) is None
    session.train(4).method.save(tmp_path, {"rank": rank})
    session.method.flush()
    torch.distributed.barrier()
    again = trained(name, 7 + rank, steps=0)
    assert again.method.resume(tmp_path) == {"rank": rank}
    assert again.method.steps == 4
    again.rank, again.steps_done = rank, 4
    assert_same(again.train(STEPS - 4).snapshot(), whole.train(STEPS).snapshot())


def saved(rank: int, world: int, folder: Path) -> None:
    session = trained("slowmo", rank, steps=3)
    session.method.save(folder)
    session.step()
    session.method.save(folder)
    torch.distributed.barrier()
    session.method.flush()


def loaded(rank: int, world: int, folder: Path, how: str) -> str:
    session = trained("slowmo", rank, steps=0)
    try:
        if how == "resume":
            session.method.resume(folder)
        else:
            go_on(session, folder, how)
    except (ConfigError, WrongCall) as error:
        return str(error)
    return "nothing"


def go_on(session: Session, folder: Path, how: str) -> None:
    """Natural attempts to do by hand what `resume` does."""
    worker = 0 if how == "replica 0's" else session.rank
    state = torch.load(folder / f"step4_worker{worker}of2.pt")
    net, optimizer, sync = session.net, session.optimizer, session.method
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


@pytest.mark.parametrize(
    ("how", "world", "text"),
    [
        ("resume", 3, "is of 2 workers, not of 3; start as many"),
        ("forgotten", 2, "the model's weights were written after prepare"),
        ("replica 0's", 2, "this is worker 1 of 2; load on each what it saved itself"),
        ("before prepare", 2, "the model holds others; after prepare load model"),
    ],
)
def test_wrong_ways_to_go_on(
    workers: Pool, how: str, world: int, text: str, tmp_path: Path
) -> None:
    workers.run(saved, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step4_worker{worker}of2.pt" for worker in range(2)
    ], "older ones are deleted"
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
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    with told("cannot be read", ConfigError):
        trained("co2", steps=0).method.resume(tmp_path)


def test_parameters_of_a_second_optimizer() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (SGD(part.parameters(), lr=0.1) for part in net)
    with told("optimizer=SGD: trains parameters that the model does not have", ConfigError):
        co2.CO2().prepare(net[0], SGD(net.parameters(), lr=0.1), co2.Mesh.world())
    sync = co2.CO2()
    sync.prepare(net, first, co2.Mesh.world())
    net(torch.ones(1, 2)).sum().backward()
    sync.step()
    second.step()
    with told("1.weight was written, and the method's optimizer does not hold it"):
        sync.step()
    with told("with a method of its own"), sync.consensus():
        pytest.fail("nothing may be shown")


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("added", [False, True], ids=["unfrozen", "added"])
def test_a_parameter_trained_since_prepare(name: str, added: bool) -> None:
    """Nobody would synchronize it: the next step refuses, by its name."""
    net, optimizer = problem.build(0, inner(name), torch.float64)
    late: nn.Parameter = net.enter.weight
    if added:
        late = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        net.register_parameter("late", late)
    else:
        late.requires_grad_(False)
    method = METHODS[name](METHODS[name].Config(**SETTINGS[name]))
    model = method.prepare(net, optimizer, co2.Mesh.world())
    problem.backward(model, 0, 0)
    method.step()
    late.requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": [late]})
    of = next(at for at, param in net.named_parameters() if param is late)
    with pytest.raises(ConfigError, match=f"parameter={of}: was not trained .* before prepare"):
        method.step()


@pytest.mark.parametrize("call", ["step", "consensus"])
def test_parameters_frozen_since_prepare(call: str) -> None:
    session = trained("local_sgd")
    session.net.leave.bias.requires_grad_(False)
    with told("parameter=leave.bias: was trained when prepare was called", ConfigError):
        if call == "step":
            session.step()
        with session.method.consensus():
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


@replicas(2)
@pytest.mark.parametrize("name", grid(METHODS, ("co2", "cocod_sgd").__contains__))
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
