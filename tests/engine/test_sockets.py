"""A collective whose connections are cut ends, also where gloo forgets to tell it, and what NCCL
carries is ended as one: without a GPU, the order of the calls."""

import random
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest
import torch
import torch.distributed as dist

from co2.comm.waiting import finish, has_leaked, is_loss, until_cut, use
from co2.elastic.members import Members
from co2.elastic.sockets import Sockets, abort, make_group, nccl_backends
from tests.workers import Pool, replicas

TRIALS = 40
"""Of a collective that is cut."""


@pytest.fixture
def fresh(workers: Pool) -> Iterator[None]:
    """Workers whose threads no other test meets: some wait until their time is out."""
    workers.close()
    yield
    workers.close()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store: dist.TCPStore) -> int:
    return store.port


@replicas(2)
def test_only_the_connections_of_groups_are_cut(rank: int, world: int, port: int) -> None:
    """Others are nobody's business that were opened while the groups were: between two of them, and
    by another thread amid one."""
    dist.destroy_process_group()  # the pool's own
    members = Members(("127.0.0.1", port), rank, 30.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connected() -> tuple[socket.socket, socket.socket]:
            return socket.create_connection(server.getsockname()), server.accept()[0]

        members.first(range(world))
        pairs = [connected()]

        def amid_others(*arguments: Any) -> dist.ProcessGroup:
            pairs.append(connected())
            return make_group(*arguments)

        with patch("co2.elastic.members.make_group", amid_others):
            group = members.new_group(range(world), None)
        members.formed()
        members.agree()
        members.cut(members.generation)
        assert len(pairs) == 2
        for one, other in pairs:
            one.sendall(b"on")
            assert other.recv(2) == b"on"
            one.close()
            other.close()
    with pytest.raises(RuntimeError):
        finish(dist.all_reduce(torch.ones(1), group=group, async_op=True), group, members.sockets)
    members.close()
    members.sockets.cut()


@replicas(2)
@pytest.mark.usefixtures("fresh")
def test_a_collective_that_is_cut_ends(rank: int, world: int) -> None:
    """As it begins or amid."""
    random.seed(rank)
    failed = 0
    for _ in range(TRIALS):
        sockets = Sockets()
        with sockets.opening():
            group = dist.new_group(list(range(world)))
        dist.barrier()
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        time.sleep(0.0005 * random.random())
        sockets.cut()
        try:
            finish(work, group, sockets)
        except RuntimeError:
            failed += 1
        del work, group  # takes the group down, unless it was leaked
    assert failed > 0


@replicas(1)
@pytest.mark.usefixtures("fresh")
def test_what_blocks_ends_with_the_connections() -> None:
    """Something that fails; something that works; something that never ends by itself."""
    sockets = Sockets()
    use(sockets)
    with pytest.raises(IndexError):
        until_cut(lambda: [][0])
    assert until_cut(lambda: "done") == "done"
    sockets.cut()
    with pytest.raises(RuntimeError, match="was cut"):
        until_cut(lambda: time.sleep(60))
    assert has_leaked()
    use(None)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]", True),
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:36869", True),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_an_error_of_a_lost_worker(text: str, loss: bool) -> None:
    assert is_loss(RuntimeError(text)) is loss


def test_all_groups_are_aborted_as_one() -> None:
    calls = MagicMock()
    abort([calls.first, calls.second])
    start, end = call.first._group_start(), call.first._group_end()
    assert calls.mock_calls == [start, call.first.abort(), call.second.abort(), end]
    calls.first.abort.side_effect = RuntimeError("aborted before")
    with pytest.raises(RuntimeError, match="before"):
        abort([calls.first])
    assert calls.first._group_end.call_count == 2, "nothing is left open"


@replicas(2)
def test_groups_of_gloo_are_left_alone() -> None:
    assert nccl_backends([dist.group.WORLD]) == []
    abort([])
    dist.barrier()
