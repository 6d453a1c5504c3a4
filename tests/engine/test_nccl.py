"""What NCCL carries is ended as one, without a GPU: the order of the calls."""

from unittest.mock import MagicMock, call

import pytest
import torch.distributed as dist

from co2.elastic.sockets import abort, nccl_backends
from tests.workers import Pool


def test_all_groups_are_aborted_as_one() -> None:
    calls = MagicMock()
    abort([calls.first, calls.second])
    start, end = call.first._group_start(), call.first._group_end()
    assert calls.mock_calls == [start, call.first.abort(), call.second.abort(), end]


def test_one_that_cannot_be_aborted_leaves_nothing_open() -> None:
    first = MagicMock()
    first.abort.side_effect = RuntimeError("aborted before")
    with pytest.raises(RuntimeError, match="before"):
        abort([first])
    first._group_end.assert_called_once()


def number_of_groups(rank: int, world: int) -> int:
    found = nccl_backends([dist.group.WORLD])
    abort(found)
    return len(found)


def test_those_of_gloo_are_left_alone(workers: Pool) -> None:
    assert workers.run(number_of_groups, 2) == [0, 0]
    assert workers.run(number_of_groups, 2) == [0, 0], "they still can meet"
