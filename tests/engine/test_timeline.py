"""Traces of real runs hold their rounds, and the timeline's lanes are what the events say."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from matplotlib.text import Text
from torch import Tensor
from torch.profiler import profile

from co2.comm.phases import OUTER_STEP, SNAPSHOT, STEP_END, WAIT
from co2.comm.waiting import begin_recording, end_recording, note_recorded
from co2.record import timeline
from tasks.toy import Toy
from tests.cli.harness import metrics, pooled
from tests.workers import Pool, replicas


def event(name: str, begin: float, end: float, cat: str = "cpu_op", kind: str = "") -> dict:
    """A complete event; times in seconds."""
    args = {"Input type": [kind]} if kind else {}
    times = {"ts": 5e6 + begin * 1e6, "dur": (end - begin) * 1e6}
    return {"ph": "X", "name": name, "cat": cat, "args": args, **times}


def mark(name: str, begin: float, end: float, kind: str = "") -> dict[str, Any]:
    return event(name, begin, end, "user_annotation", kind)


def close(spans: list, expected: list) -> None:
    assert [pytest.approx(span, abs=1e-6) for span in spans] == expected


def test_a_processor_that_waits() -> None:
    lanes = timeline.timeline(
        [
            event("aten::mm", 0, 0.4),
            event("aten::add", 0.4005, 0.5),  # a pause of the interpreter
            event("c10d::allreduce_", 0.5, 0.9),
            mark("gloo:all_reduce", 0.45, 0.8, "float"),
            mark("gloo:all_reduce", 0.1, 0.3, "long int"),  # a flag
            mark(WAIT, 0.5, 0.8),
            event("aten::copy_", 0.55, 0.56),  # inside of waiting nothing is computed
            mark(OUTER_STEP, 0.5, 1.0),
            mark(SNAPSHOT, 0.8, 0.9),
            event("aten::sub", 0.8, 1.0),
            mark("gloo:all_reduce", 0.95, 1.5, "float"),  # beyond the last step
        ]
    )
    close(lanes.compute, [(0, 0.5), (0.8, 1.0)])
    close(lanes.collectives, [(0.45, 0.8), (0.95, 1.0)])
    close(lanes.still, [(0.5, 0.8)])
    close(lanes.outer_steps, [(0.5, 1.0)])
    close(lanes.snapshots, [(0.8, 0.9)])
    figures = lanes.figures()
    assert figures["window_s"] == pytest.approx(1) and figures["compute_s"] == pytest.approx(0.7)
    assert figures["overlap"] == pytest.approx(1 - 0.3 / 0.4)


def test_a_gpu_whose_host_waits() -> None:
    lanes = timeline.timeline(
        [
            event("aten::mm", 0, 0.1),
            event("gemm", 0.1, 0.6, "kernel"),
            event("gemm", 0.8, 1.0, "kernel"),
            event("ncclDevKernel_AllReduce", 0.3, 0.7, "kernel"),
            mark(WAIT, 0.2, 0.9),
        ]
    )
    close(lanes.compute, [(0, 0.5), (0.7, 0.9)])
    close(lanes.collectives, [(0.2, 0.6)])
    close(lanes.still, [(0.5, 0.6)])


def steps(*ends: float) -> list[dict[str, Any]]:
    """A trace of steps that end at these moments: each computes first and sends in its second half,
    with nothing else to do."""
    events = [mark(STEP_END, 0, 0)]
    for begin, end in itertools.pairwise((0.0, *ends)):
        half = (begin + end) / 2
        events += [event("aten::mm", begin, half), mark(STEP_END, end, end)]
        events += [mark("gloo:all_reduce", half, end, "float")]
    return [*events, event("aten::mm", ends[-1], ends[-1] + 1)]  # of a step that is cut off


def test_runs_are_shown_with_equally_many_steps() -> None:
    """The last ones of each, because a round sends what the round before it has brought about."""
    slow, fast = (timeline.timeline(steps(*ends)) for ends in ((2, 4), (1, 2, 2.5, 3)))
    assert (slow.steps, fast.steps) == (2, 4)
    shown = timeline.alike({"slow": slow, "fast": fast})
    assert [(lanes.steps, pytest.approx(lanes.seconds)) for lanes in shown.values()] == [
        (2, 4),
        (2, 1),
    ]
    close(shown["fast"].compute, [(0, 0.25), (0.5, 0.75)])
    close(shown["fast"].still, [(0.25, 0.5), (0.75, 1)])
    words = {text.get_text() for text in timeline.figure(shown).findobj(Text)}
    assert {"slow", "2 steps in 4.0 s", "fast", "2 steps in 1.0 s"} <= words


def test_a_span_over_the_first_step_that_is_shown_is_cut() -> None:
    lanes = timeline.timeline([*steps(1, 2), mark("gloo:all_reduce", 0.2, 1.3, "float")]).last(1)
    close(sorted(lanes.collectives), [(0, 0.3), (0.5, 1)])


def test_spans() -> None:
    assert timeline.merged([(2, 3), (0, 1), (0.5, 1.5)]) == [(0, 1.5), (2, 3)]
    assert timeline.merged([(0, 1), (1.1, 2)], pause=0.2) == [(0, 2)]
    assert timeline.without([(0, 10)], [(-1, 1), (3, 4), (9, 12)]) == [(1, 3), (4, 9)]
    assert timeline.without([(0, 1), (2, 3)], [(0, 3)]) == []
    assert timeline.total([(0, 1), (2, 4)]) == 3


@pytest.mark.parametrize("method", ["co2", "allreduce"])
def test_a_real_run(workers: Pool, tmp_path: Path, method: str) -> None:
    """Steps 7 to 18 of τ = 3 hold four rounds; the last collective may outlive the trace."""
    arguments = ["train.steps=24", f"method={method}", "train.eval_every=24"]
    arguments += [] if method == "allreduce" else [f"{method}.tau=3"]
    traced = pooled(workers, 2, *arguments, "trace=true", runs=tmp_path / "traced")
    assert traced.status == 0, traced.err
    names = sorted(path.name for path in (traced.folder / "trace").iterdir())
    assert names == ["rank_0.json", "rank_1.json"]
    for rank in range(2):
        lanes = timeline.read(traced.folder, rank)
        assert 0 < timeline.total(lanes.compute) <= lanes.seconds
        assert lanes.steps == 12
        if method == "allreduce":  # one bucket a step
            assert 11 <= len(lanes.collectives) <= 13 and not lanes.outer_steps
        else:
            assert len(lanes.outer_steps) == 4 and len(lanes.snapshots) == 4
            assert 3 <= len(lanes.collectives) <= 5
    picture = tmp_path / "figure" / "one.png"
    assert timeline.main([str(traced.folder), "--out", str(picture)]) == 0
    assert picture.stat().st_size > 5000
    # Tracing changes nothing of the training.
    plain = pooled(workers, 2, *arguments, runs=tmp_path / "plain")
    losses = [[line["loss"] for line in metrics(run.folder, "train")] for run in (plain, traced)]
    assert losses[0] == losses[1]
    assert not (plain.folder / "trace").exists()


LATE_S = 0.5
"""Whoever waits for worker 1 waits so long; whoever does not is seen earlier."""


@contextlib.contextmanager
def late_at_the_end(folder: Path) -> Iterator[None]:
    """Setup: worker 1 is late at step 17 of a trace that ends with step 18. Each worker writes down
    how many of its collectives are under way as its profiler stops."""
    rank, works, calls = dist.get_rank(), [], []
    all_reduce, stop, loss = dist.all_reduce, profile.stop, Toy.loss

    def launch(*args: Any, **kwargs: Any) -> dist.Work | None:
        work = all_reduce(*args, **kwargs)
        works.extend([] if work is None else [work])
        return work

    def counting(self: profile) -> None:
        under_way = sum(not work.is_completed() for work in works)
        (folder / f"worker{rank}").write_text(str(under_way))
        stop(self)

    def late(self: Toy, *args: Any) -> Tensor:
        calls.append(None)
        if rank == 1 and len(calls) == 17:
            until = time.monotonic() + LATE_S
            while time.monotonic() < until and not (folder / "worker0").exists():
                time.sleep(0.01)
        return loss(self, *args)

    patches = (patch.object(dist, "all_reduce", launch), patch.object(profile, "stop", counting))
    with patches[0], patches[1], patch.object(Toy, "loss", late):
        yield


def test_nothing_is_under_way_as_a_trace_ends(workers: Pool, tmp_path: Path) -> None:
    """gloo would write the end of a collective, such as that of a round or of the vote on stopping,
    into memory that the profiler has freed; many such runs died within the next hundred steps."""
    arguments = ["method=co2", "co2.tau=3", "train.steps=120", "train.eval_every=120"]
    setup = {"setup": late_at_the_end, "setup_arguments": (tmp_path,)}
    runs = tmp_path / "runs"
    run = pooled(workers, 2, *arguments, "checkpoint.every=9", "trace=true", runs=runs, **setup)
    assert run.status == 0, run.err
    assert [(tmp_path / f"worker{rank}").read_text() for rank in range(2)] == ["0", "0"]
    assert len(timeline.read(run.folder).outer_steps) == 4


@replicas(2)
def test_a_run_that_fails_does_not_wait_for_its_trace() -> None:
    """What is under way may wait for a worker that is gone, and then the profiler must not stop."""
    for collectives, wait, may_stop in ((0, False, True), (1, False, False), (1, True, True)):
        begin_recording()
        launched = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(collectives)]
        for work in launched:
            note_recorded(work, None)
        assert end_recording(wait) == may_stop
        assert not wait or all(work.is_completed() for work in launched)
        for work in launched:
            work.wait()


@pytest.mark.parametrize(("text", "told"), [(None, "trace=true"), ("{", "no Chrome trace")])
def test_no_trace_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / "trace").mkdir()
        (tmp_path / "trace/rank_0.json").write_text(text)
    assert timeline.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: RUN={tmp_path}") and told in error and error.count("\n") == 1
