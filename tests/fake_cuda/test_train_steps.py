"""Train steps on fake CUDA tensors: what a machine without a GPU can say about the code that runs on one.

The trainer's real code runs on tensors of a device that has shapes, dtypes and streams, but no values. The
tests find what CUDA and NCCL refuse, operators that mix devices, waits of the host, and what ends on the
wrong device.
"""

from __future__ import annotations

import re
from dataclasses import replace
from operator import sub

import pytest

from megalite.observe.verify.layouts import TABLE
from tests.covering import pairs
from tests.fake_cuda.cases import CASES, Case, case
from tests.fake_cuda.child import FakeGpu
from tests.fake_cuda.refusals import OVERLAP
from tests.fake_cuda.rows import adds_part, covering_rows, parts

ROWS = list(covering_rows(list(CASES.values())))
RESULTS = "reduction by megalite/utils/hardware/host_memory.py (read)"
"""The wait for loss and norm."""
WAITS_WITH_OFFLOADED_STATE = {
    "reduction by megalite/distributed/topology.py (to_host)",  # the norm, and so all gradients
    "reduction by megalite/optim/adamw.py (step)",  # whether to update, and what the host's update needs
}


def check(gpu: FakeGpu, case: Case) -> None:
    config = case.config()
    waits = {RESULTS, *(WAITS_WITH_OFFLOADED_STATE if config.optimizer.optimizer_cpu_offload else ())}
    for rank, outcome in gpu(case).items():
        assert not outcome.error, f"rank {rank}: {outcome.error}"
        assert not outcome.mixed, "\n".join([f"rank {rank} mixes devices:", *outcome.mixed])
        waiting = {re.sub(r".* in |:\d+", "", wait) for wait in outcome.waits}
        assert waiting == waits, "\n".join([f"rank {rank} waits for the device:", *outcome.waits])
        assert not outcome.pageable, "\n".join([f"rank {rank} copies pageable memory:", *outcome.pageable])
        assert not outcome.misplaced, "\n".join([f"rank {rank} has:", *outcome.misplaced])
        assert outcome.launches["backward"]
        # The first wait is for the results of the first iteration. Until then, the second one's gradients
        # are queued, unless their scale depends on these results.
        num_before = sum(outcome.launches[phase].total() for phase in ("forward", "backward"))
        has_dynamic_scale = config.model.params_dtype == "fp16"
        assert (outcome.num_launched[0] >= num_before) is not has_dynamic_scale, outcome.num_launched


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if adds else pytest.mark.slow)  # few pairs that no other row has
        for row, adds in zip(ROWS, adds_part(ROWS), strict=True)
    ],
    ids=lambda row: f"{row.layout} {row.preset}",
)
def test_a_step_neither_mixes_devices_nor_waits(gpu: FakeGpu, row: Case) -> None:
    check(gpu, row)


@pytest.mark.parametrize("layout", ["tp1", "pp2dp2+zero3"])
def test_the_loop_queues_an_iteration_before_each_wait_but_the_last(gpu: FakeGpu, layout: str) -> None:
    """Test it with log lines, checks of the loss and of signals, and garbage collections in between."""
    whole = replace(
        case(layout, check_for_spiky_loss=True, manual_gc_interval=1, hang_timeout=0), num_logged=4
    )
    for outcome in gpu(whole).values():
        assert not outcome.error, outcome.error
        waits = [re.sub(r".* in |:\d+", "", wait) for wait in outcome.waits]
        assert waits == [RESULTS] * whole.num_logged, outcome.waits
        # The launches after the first update: the second iteration's gradients, then its update and the
        # third one's gradients, and so on. The last iteration queues none.
        gradients, *periods, last = map(sub, outcome.num_launched, [0, *outcome.num_launched])
        assert len(set(periods)) == 1
        assert 0 < last == periods[0] - gradients < periods[0]


def test_few_rows_have_every_pair_of_the_cases() -> None:
    found = set().union(*(pairs(parts(row)) for row in ROWS))
    for name, each in CASES.items():
        assert pairs(parts(each)) <= found, name
    assert len(ROWS) < len(CASES) / 2
    adding = [row for row, adds in zip(ROWS, adds_part(ROWS), strict=True) if adds]
    run = set().union(*(pairs(parts(row)) for row in adding))
    assert {part for pair in run for part in pair} == {part for pair in found for part in pair}
    assert len(run) > 0.98 * len(found)  # of the others, slow rows have some, and the cases alone all


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_case_alone(gpu: FakeGpu, name: str) -> None:
    check(gpu, CASES[name])


@pytest.mark.parametrize(
    ("injected", "layout", "found"),
    [
        ("expanded tokens are pinned", "tp1", OVERLAP),
        (
            "tokens are copied from pageable memory",
            "tp1",
            "non-blocking copy with pageable memory",
        ),
        ("an expanded tensor is written", "dp2", OVERLAP),
        ("transposed memory is gathered", "tp2+sp", "_allgather_base_: tensors must be contiguous"),
        ("a gather has a part too few", "tp2+sp", "_allgather_base_: a tensor must be the world size"),
        ("integers of 16 bits are summed", "dp2", "allreduce_: NCCL has no type for torch.int16"),
        ("host and device are summed", "dp2", "some are on the host"),
        ("a message has no elements", "pp2", "send: a message without elements"),
    ],
)
def test_an_injected_error_is_found(gpu: FakeGpu, injected: str, layout: str, found: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(found)):
        check(gpu, replace(case(layout), injected=injected))


@pytest.mark.slow
@pytest.mark.parametrize("layout", TABLE)
def test_every_layout(gpu: FakeGpu, layout: str) -> None:
    check(gpu, case(layout, num_layers=4))


def test_a_message_in_another_dtype_is_copied_back(gpu: FakeGpu) -> None:
    """As on a GPU. A dry run counts these copies, too."""
    rounded, exact = CASES["data parallel"], case("dp2")
    copies = [sum(counts["copy_"] for counts in gpu(each)[0].launches.values()) for each in (rounded, exact)]
    assert copies[0] > copies[1]
