"""Methods that send a part at a time: NoLoCo's pairs of replicas, SPARTA's weights, and fragments,
of Streaming DiLoCo and of kept progress. Who and what is drawn or dealt out, what an exchange makes
of it, and how large NoLoCo's γ may be."""

import itertools
from collections import Counter
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD

import co2
from co2.comm.flat import FlatParams
from co2.comm.pair_mean import partner_of
from co2.errors import ConfigError
from co2.methods.shared.fragments import offset
from co2.methods.streaming_diloco import StreamingDiLoCo, layer, strided, sync_step
from tests.grids import grid
from tests.methods import problem
from tests.methods.driver import drifted
from tests.methods.test_identities import TAU, round_starts
from tests.workers import everybody, replicas

# NoLoCo.


def test_every_pair_is_equally_likely() -> None:
    """Of six replicas 1,000 times each, and each alone of five 1,000 times: ± 4 √1000."""
    for seed in range(50):
        partners = [partner_of(replica, 7, seed) for replica in range(7)]
        assert partners.count(None) == 1 and all(
            other is None or (partners[other] == one and other != one)
            for one, other in enumerate(partners)
        )
    met = Counter(partner_of(0, 6, seed) for seed in range(5000))
    alone = Counter(r for seed in range(5000) for r in range(5) if partner_of(r, 5, seed) is None)
    assert met.keys() == {1, 2, 3, 4, 5} and alone.keys() == {0, 1, 2, 3, 4}
    assert all(abs(number - 1000) < 127 for number in (*met.values(), *alone.values()))


HEAVY_BALL = {"tau": TAU, "outer_lr": 0.8, "outer_momentum": 0.6}


@replicas()
@pytest.mark.parametrize(
    ("world", "pull"), grid([(1, 0.9), (2, 0.9), (3, 0.9), (4, 0.3)], lambda case: case[0] < 4)
)
def test_the_mean_is_heavy_ball_diloco(rank: int, world: int, pull: float) -> None:
    """Which SlowMo is at a constant inner rate. On up to two replicas γ finds no difference to pull
    at, and each is the mean."""
    pairs = everybody(round_starts(rank, ("noloco", {**HEAVY_BALL, "pull": pull})))
    together = round_starts(rank, ("slowmo", HEAVY_BALL))
    for starts, mean in zip(zip(*pairs, strict=True), together, strict=True):
        torch.testing.assert_close(sum(starts) / world, mean, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(start, starts[0]) for start in starts) == (world < 3)


def growth(count: int, momentum: float, pull: float) -> float:
    """Factor by which a round changes the mean square of the differences, in the long run: the
    spectral radius of E[A ⊗ A], where A is a round without progress on (φ, m) less their means."""
    eye = torch.eye(count, dtype=torch.float64)
    less_mean = eye - 1 / count
    squares = torch.zeros((2 * count) ** 2, (2 * count) ** 2, dtype=torch.float64)
    orders = itertools.permutations(range(count))
    pairs = (zip(order[::2], order[1::2], strict=True) for order in orders)
    matchings = {frozenset(map(frozenset, matching)) for matching in pairs}
    for matching in matchings:
        swap = torch.zeros_like(eye)
        for one, other in matching:
            swap[one, other] = swap[other, one] = 1
        towards = pull * ((eye + swap) / 2 - eye)
        top = torch.cat([eye + towards, momentum * eye], dim=1)
        bottom = torch.cat([towards, momentum * eye], dim=1)
        project = torch.block_diag(less_mean, less_mean)
        step = project @ torch.cat([top, bottom])
        squares += torch.kron(step, step) / len(matchings)
    return torch.linalg.eigvals(squares).abs().max().item()


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.8])
def test_the_bound_of_the_pull(count: int, momentum: float) -> None:
    bound = 2 * (1 - momentum**2) / (1 - momentum / (count - 1))
    shares = (0.1, 0.5, 0.99, 1.01)
    assert [growth(count, momentum, share * bound) < 1 for share in shares] == [True] * 3 + [False]
    co2.NoLoCo.Config(outer_momentum=momentum, pull=min(0.999 * bound, 1.999 * (1 - momentum**2)))


# SPARTA.

SIZES = (1000, 0, 3, 77)


def drawn(share: float, steps: int) -> list[Tensor]:
    """The places that each step draws, in the vector of all weights."""
    params = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    method = co2.SPARTA(co2.SPARTA.Config(share=share))
    optimizer = torch.optim.SGD(params, lr=1.0)
    method.prepare(torch.nn.ParameterList(params), optimizer, co2.Mesh.world())
    begins = accumulate(SIZES[:-1], initial=0)
    starts = {id(part): begin for part, begin in zip(method.flat.params, begins, strict=True)}
    found = []
    for _ in range(steps):
        for param in params:
            param.grad = torch.zeros_like(param)
        method.step()
        own = [starts[id(part)] + method.places[span] for part, span in method.spans]
        found.append(torch.cat(own))
    return found


def test_all_are_drawn_alike() -> None:
    """216 of 1,080 in each of 500 steps: each 100 times, ± 5 √(500 · 0.2 · 0.8)."""
    steps = drawn(0.2, 500)
    counts = torch.bincount(torch.cat(steps), minlength=1080)
    assert len(counts) == 1080 and (counts - 100).abs().max() < 45
    assert not torch.equal(steps[0], steps[1])


def test_steps_forget_each_other() -> None:
    """After t steps (1 − 1/5)^t of the weights were never drawn: of 1,080, ± 5 deviations."""
    untouched = torch.ones(1080, dtype=torch.bool)
    for step, places in enumerate(drawn(0.2, 12), start=1):
        untouched[places] = False
        chance = 0.8**step
        spread = 5 * (1080 * chance * (1 - chance)) ** 0.5
        assert abs(untouched.sum().item() - 1080 * chance) < spread


@replicas(3)
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_mean_of_the_weights_stays(rank: int, delay: int) -> None:
    """It is that of local SGD, under gradients that do not depend on the weights."""
    shared = everybody(round_starts(rank, ("sparta", {"share": 0.3, "delay": delay})))
    together = round_starts(rank, ("local_sgd", {"tau": TAU}))
    for ends, mean in zip(zip(*shared, strict=True), together, strict=True):
        torch.testing.assert_close(sum(ends) / 3, mean, rtol=1e-12, atol=1e-12)
        assert not torch.equal(ends[0], ends[1])


# Streaming DiLoCo.


@pytest.mark.parametrize("tau", [1, 2, 5, 6, 12])
def test_no_two_fragments_share_a_step(tau: int) -> None:
    for fragments in range(1, tau + 1):
        model, optimizer = problem.build_drift([2] * fragments)
        method = StreamingDiLoCo(tau=tau, fragments=fragments, delay=0)
        method.prepare(model, optimizer, co2.Mesh.world())
        steps: list[list[int]] = [[] for _ in range(fragments)]
        for step in range(1, 2 * tau + 1):
            before = [fragment.outer.clone() for fragment in method.fragments]
            problem.backward_drift(model, step, 0)
            method.step()
            for number, fragment in enumerate(method.fragments):
                if not torch.equal(fragment.outer, before[number]):
                    steps[number].append(step)
        together = [step for own in steps for step in own]
        assert len(together) == len(set(together)) == 2 * fragments, (tau, fragments)
        for number, (first, second) in enumerate(steps):
            assert second == first + tau and first % tau == sync_step(number, tau, fragments)
        firsts = [first for first, _ in steps]
        assert firsts == sorted(firsts) and firsts[-1] == tau
        if tau % fragments == 0:
            assert firsts == list(range(tau // fragments, tau + 1, tau // fragments))
        apart = {b - a for a, b in itertools.pairwise(firsts)}
        assert apart <= {tau // fragments, -(-tau // fragments)}, "as even as whole steps can be"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.h.3.attn.bias", "transformer.h.3"),
        ("layer1.0.downsample.1.weight", "layer1.0"),
        ("0.weight", "0"),
        ("blocks.10", "blocks.10"),
        ("wte.weight", "wte.weight"),
        ("scale", "scale"),
    ],
)
def test_layers(name: str, expected: str) -> None:
    assert layer(name) == expected


class Small(nn.Module):
    """In the model's order: enter, h.0 (three parameters, one frozen), h.1, leave (two layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 2, bias=False)
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])
        self.leave = nn.Linear(2, 2)
        self.h[0][1].bias.requires_grad_(False)


def test_layers_are_dealt_out_in_turn() -> None:
    model = Small()
    optimizer = SGD(reversed(list(model.parameters())), lr=1.0)  # its order does not matter
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [[names[id(p)] for p in part] for part in strided(model, optimizer, 2)]
    assert found == [
        ["enter.weight", "h.1.weight", "h.1.bias", "leave.bias"],
        ["h.0.0.weight", "h.0.0.bias", "h.0.1.weight", "leave.weight"],
    ]


def test_more_fragments_than_layers_are_refused() -> None:
    model, optimizer = problem.build_drift([3, 4])
    method = StreamingDiLoCo(StreamingDiLoCo.Config(fragments=3))
    with pytest.raises(ConfigError, match=r"^streaming_diloco.fragments=3: must be at most 2, .*$"):
        method.prepare(model, optimizer, co2.Mesh.world())


# Fragments of kept progress.


def test_the_vector_is_cut_between_rows_into_near_equal_fragments() -> None:
    """A row belongs where it begins; the large tensor, half of all, is in many fragments."""
    shapes = [(3, 4), (), (0, 5), (24, 2), (5, 3), (20,)]
    model = nn.ParameterList(torch.randn(shape) for shape in shapes)
    optimizer = SGD(model.parameters(), lr=1.0)
    every = FlatParams(optimizer).copy()
    for number in (1, 2, 3, 5, 12):
        parts = [FlatParams(optimizer, part=(part, number)) for part in range(number)]
        assert torch.equal(torch.cat([part.copy() for part in parts]), every)
        assert all(abs(part.numel - len(every) / number) < 4 for part in parts), "a row has four"
    parts[3].write(parts[3].zeros())
    assert (FlatParams(optimizer).copy() == 0).sum() == parts[3].numel, "its own, and no others"
    few = [FlatParams(SGD([model[1]], lr=1.0), part=(part, 3)).numel for part in range(3)]
    assert sorted(few) == [0, 0, 1], "fewer elements than fragments, as a shard may have"


@replicas(2)
def test_workers_of_a_replica_cut_what_they_both_hold_alike(rank: int) -> None:
    """Beside shards of 11 and 10 rows, as tensor parallelism makes them."""
    mesh = init_device_mesh("cpu", (2,))
    weights = [
        distribute_tensor(torch.randn(21, 2), mesh, [Shard(0)]),
        torch.randn(9, 2),
        distribute_tensor(torch.randn(5), mesh, [Shard(0)]),
        torch.randn(8),
    ]
    model = nn.ParameterList(nn.Parameter(weight) for weight in weights)
    optimizer = SGD(model.parameters(), lr=1.0)
    for number in (2, 5, 12):
        found = []
        for part in range(number):
            flat = FlatParams(optimizer, part=(part, number))
            pairs = zip(flat.owners, flat.params, strict=True)
            rows = {id(owner): len(piece) for owner, piece in pairs}
            found.append([rows.get(id(model[index]), 0) for index in (1, 3)])
        assert [sum(own) for own in zip(*found, strict=True)] == [9, 8]
        one, other = everybody(found)
        assert one == other


@pytest.mark.parametrize("tau", [1, 2, 5, 6, 12])
def test_one_fragment_after_the_other_is_under_way(tau: int) -> None:
    """Never two, never none, and each once in a round, at steps as even as whole steps can be."""
    for number in range(1, tau + 1):
        model, optimizer = problem.build_drift([2] * number)
        method = co2.CO2Keep(tau=tau, fragments=number)
        method.prepare(model, optimizer, co2.Mesh.world())
        sent: list[tuple[int, int]] = []
        for step in range(1, 3 * tau + 1):
            problem.backward_drift(model, step, 0)
            method.step()
            flying = [n for n, one in enumerate(method.fragments) if one.mean.in_flight]
            assert len(flying) == (step >= offset(1, tau, number)), (tau, number, step)
            place = step % tau
            sent += [(step, n) for n in flying if place == offset(n, tau, number)]
        steps, order = zip(*sent, strict=True)
        assert order == tuple(n % number for n in range(1, len(order) + 1))
        apart = {b - a for a, b in itertools.pairwise(steps)}
        assert apart <= {tau // number, -(-tau // number)}, (tau, number)


@replicas(2)
@pytest.mark.parametrize(
    ("tau", "number", "delay", "together", "groups"),
    [
        (3, 3, None, 1, 1),
        (3, 3, 1, 1, 1),
        (3, 3, 2, 2, 3),
        (6, 6, 2, 2, 2),
        (6, 6, 3, 3, 3),
        (6, 4, 2, 2, 2),  # apart by one step or two
        (6, 5, 2, 2, 5),  # given out in turn to fewer, the last would meet the first
    ],
)
def test_fragments_that_never_meet_share_a_group(
    tau: int, number: int, delay: int | None, together: int, groups: int
) -> None:
    model, optimizer = problem.build_drift([3, 4, 5])
    method = co2.CO2Keep(tau=tau, fragments=number, delay=delay)
    method.prepare(model, optimizer, co2.Mesh.world())
    group_of = {one: one.mean.group.group_name for one in method.fragments}  # type: ignore[union-attr]
    assert len(set(group_of.values())) == groups
    assert method.group.group_name not in group_of.values()  # type: ignore[union-attr]
    most = 0
    for step in range(1, 2 * tau + 1):
        problem.backward_drift(model, step, 0)
        method.step()
        flying = [name for one, name in group_of.items() if one.mean.in_flight]
        assert len(flying) == len(set(flying))
        most = max(most, len(flying))
    assert most == together
    method.flush()


@replicas(2)
def test_fragments_hold_and_send_what_the_whole_would(rank: int) -> None:
    told = []
    for number in (1, 2, 3):
        settings = {"tau": 6, "fragments": number, "momentum_weight": 0.2}
        _, method = drifted(rank, ("co2_keep", settings), (3, 4, 5), 18)
        told.append((method.extra_copies, method.stats().bytes_sent))
    assert len(set(told)) == 1 and told[0] == (4, 3 * 12 * 8)
