"""Test the traces that profilers write."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.train.callbacks.profiler import _NsysProfile, _Window, memory_history, profiler, snapshot_path
from megalite.utils.errors import UserError


def _run(
    config: LoggingConfig,
    topology: Topology,
    num_iterations: int,
    num_done: int = 0,
    ends_after: int | None = None,
) -> None:
    """Run the iterations after `num_done`, all of them or up to `ends_after`."""
    iterations = range(num_done + 1, num_iterations + 1)
    with profiler(config, topology, iterations) as step:
        for iteration in iterations[:ends_after]:
            with torch.profiler.record_function(f"iteration {iteration}"):
                _product()
            step()


def _product() -> torch.Tensor:
    return torch.ones(8, 4) @ torch.ones(4, 16)


def test_three_iterations_are_traced_after_two(
    tmp_path: Path, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megalite")
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True, profile_name="TP_PP")
    _run(config, topology, 8)
    assert [record.message for record in caplog.records] == [
        f"profiler: the trace is in {tmp_path / 'TP_PP'}"
    ]
    (trace,) = (tmp_path / "TP_PP").iterdir()
    assert re.fullmatch(r"rank0\.\d+\.pt\.trace\.json", trace.name)  # TensorBoard's plugin reads this name
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in names if name.startswith("iteration ")} == {f"iteration {n}" for n in (3, 4, 5)}
    assert "aten::mm" in names


def test_off_it_does_nothing(tmp_path: Path, topology: Topology) -> None:
    _run(LoggingConfig(tensorboard_dir=str(tmp_path)), topology, 8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("num_iterations", "num_done", "trained"), [(10, 0, "1 to 10"), (13, 11, "12 to 13"), (13, 13, "none")]
)
def test_a_window_outside_the_run_is_warned_about_before_training(
    tmp_path: Path,
    topology: Topology,
    caplog: pytest.LogCaptureFixture,
    num_iterations: int,
    num_done: int,
    trained: str,
) -> None:
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile=True, use_pytorch_profiler=True)
    with caplog.at_level(logging.WARNING, logger="megalite"):
        profiler(config, topology, range(num_done + 1, num_iterations + 1))
    assert [record.message for record in caplog.records] == [
        f"--profile: no trace, as its first iteration is 11, and the iterations of this run are {trained}"
    ]


def test_a_run_that_ends_before_the_window_says_so(
    tmp_path: Path, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True)
    with caplog.at_level(logging.WARNING, logger="megalite"):
        _run(config, topology, 8, ends_after=1)
    assert [record.message for record in caplog.records] == [
        "--profile-execution: no trace, as the run ended before iteration 3"
    ]


def test_a_folder_that_cannot_be_written(tmp_path: Path, topology: Topology) -> None:
    (tmp_path / "name").touch()
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True, profile_name="name")
    with pytest.raises(UserError, match="cannot be written"):
        _run(config, topology, 3)


def _traced(folder: Path) -> set[str]:
    (trace,) = folder.iterdir()
    return _iterations_in(trace)


def _iterations_in(trace: Path) -> set[str]:
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    return {name for name in names if name.startswith("iteration ")}


@pytest.mark.parametrize("num_done", [0, 3, 4])
def test_megatrons_steps_are_numbers_of_the_whole_run(
    tmp_path: Path, topology: Topology, num_done: int
) -> None:
    config = LoggingConfig(
        tensorboard_dir=str(tmp_path),
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=4,
        profile_step_end=6,
    )
    _run(config, topology, 8, num_done)
    assert _traced(tmp_path / "profile") == {"iteration 5", "iteration 6"}


def test_other_ranks_are_not_profiled(tmp_path: Path, topology: Topology) -> None:
    config = LoggingConfig(
        tensorboard_dir=str(tmp_path), profile=True, use_pytorch_profiler=True, profile_ranks=(1,)
    )
    _run(config, topology, 13)
    assert not list(tmp_path.iterdir())


def test_steps_are_two_by_default(tmp_path: Path, topology: Topology) -> None:
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile=True, use_pytorch_profiler=True)
    _run(config, topology, 20)
    assert _traced(tmp_path / "profile") == {"iteration 11", "iteration 12"}


CONTENTS = {
    "pytorch_profiler_collect_shapes": lambda event: "Input Dims" in event.get("args", {}),
    "pytorch_profiler_collect_callstack": lambda event: "Call stack" in event.get("args", {}),
    "pytorch_profiler_collect_memory": lambda event: event.get("name") == "[memory]",
}
"""The events that each flag adds to a trace."""


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in CONTENTS), tuple(CONTENTS)])
def test_a_trace_holds_what_was_requested_and_nothing_else(
    tmp_path: Path, topology: Topology, flags: tuple[str, ...]
) -> None:
    config = LoggingConfig(
        tensorboard_dir=str(tmp_path), profile_execution=True, **dict.fromkeys(flags, True)
    )
    _run(config, topology, 5)
    (trace,) = (tmp_path / "profile").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    found = {flag: [event for event in events if is_one(event)] for flag, is_one in CONTENTS.items()}
    assert {flag for flag, of_flag in found.items() if of_flag} == set(flags)
    if len(flags) == len(CONTENTS):
        shapes, stack, memory = found.values()
        assert [[8, 4], [4, 16]] in [event["args"]["Input Dims"][:2] for event in shapes]
        assert any("_product" in event["args"]["Call stack"] for event in stack)
        assert 8 * 16 * 4 in [event["args"]["Bytes"] for event in memory]  # the product, in fp32


def test_nsys_needs_a_gpu(topology: Topology) -> None:
    with pytest.raises(UserError, match="pass --use-pytorch-profiler"):
        _run(LoggingConfig(profile=True), topology, 1)


@pytest.mark.parametrize("num_done", [0, 2])
def test_nsys_records_from_the_start_to_the_end(num_done: int) -> None:
    calls: list[tuple[str, int]] = []
    done = num_done
    profile = _NsysProfile(
        _Window("--profile", 3, 4, num_skipped=2, repeat=1),
        2 - num_done,
        lambda: calls.append(("start", done)),
        lambda: calls.append(("stop", done)),
    )
    for _ in range(4):
        done += 1
        profile.step()
    assert calls == [("start", 2), ("stop", 4)]


def test_nsys_records_again() -> None:
    calls: list[tuple[str, int]] = []
    done = 0
    profile = _NsysProfile(
        _Window("--profile", 3, 4, num_skipped=2, repeat=2),
        2,
        lambda: calls.append(("start", done)),
        lambda: calls.append(("stop", done)),
    )
    for _ in range(12):
        done += 1
        profile.step()
    assert calls == [("start", 2), ("stop", 4), ("start", 6), ("stop", 8)]


@pytest.mark.parametrize(
    ("num_done", "traced"),
    [(0, ["3 4", "7 8", "11 12"]), (2, ["3 4", "7 8", "11 12"]), (3, ["7 8", "11 12"]), (7, ["11 12"])],
)
def test_repeated_traces_skip_as_many_iterations(
    tmp_path: Path, topology: Topology, num_done: int, traced: list[str]
) -> None:
    config = LoggingConfig(
        tensorboard_dir=str(tmp_path),
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=2,
        profile_step_end=4,
        profile_repeat=3,
    )
    _run(config, topology, 16, num_done)
    expected = [{f"iteration {n}" for n in pair.split()} for pair in traced]
    assert sorted(map(_iterations_in, (tmp_path / "profile").iterdir()), key=sorted) == sorted(
        expected, key=sorted
    )


def test_a_trace_of_every_rank_repeats(tmp_path: Path, topology: Topology) -> None:
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True, profile_repeat=2)
    _run(config, topology, 20)
    found = set().union(*map(_iterations_in, (tmp_path / "profile").iterdir()))
    assert found == {f"iteration {n}" for n in (3, 4, 5, 8, 9, 10)}


def test_memory_history_without_a_gpu_is_warned_of_by_name(
    topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="megalite"),
        memory_history(LoggingConfig(record_memory_history=True), topology),
    ):
        pass
    assert [record.message for record in caplog.records] == [
        "--record-memory-history has no effect: it records GPU memory, and there is no GPU"
    ]


def test_each_ranks_snapshot_has_a_name() -> None:
    config = LoggingConfig(profile_ranks=(2, 3), memory_snapshot_path="d/memory.pickle")
    assert [str(snapshot_path(config, rank)) for rank in (2, 3)] == [
        "d/memory.pickle",
        "d/memory_rank3.pickle",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_memory_history_is_written(tmp_path: Path, topology: Topology) -> None:
    path = tmp_path / "memory.pickle"
    with memory_history(LoggingConfig(record_memory_history=True, memory_snapshot_path=str(path)), topology):
        torch.ones(1024, device="cuda")
    assert path.stat().st_size > 0
