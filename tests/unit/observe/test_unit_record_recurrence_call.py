"""The planned work of the kernels of recurrences, against what is launched."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.recurrence import block_size, launch, launch_backward, sizes_for
from megalite.observe.meta_tensors import LiveBytes
from megalite.observe.unit_record import RecurrenceCall

B, G, R, S, D, E = 2, 2, 3, 4096, 64, 32


class Launches:
    """Takes the place of the kernels, and notes the grid and the bytes of the tensors of each launch."""

    def __init__(self, ignored: tuple[int, ...]) -> None:
        self.found: list[tuple[int, int]] = []
        self.ignored = ignored

    def __getattr__(self, name: str) -> Launches:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def kernel(*args: Any, **_: Any) -> None:
            tensors = {each.data_ptr(): each for each in args if isinstance(each, Tensor)}
            sizes = [each.nbytes for each in tensors.values() if each.numel() not in self.ignored]
            self.found.append((math.prod(grid), sum(sizes)))

        return kernel


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels that compute nothing. Numbers of each token and single states are not counted."""
    found = Launches((B * G * R * S, B * G * R * D * E))
    monkeypatch.setitem(sys.modules, "megalite.kernels.triton_recurrence", found)  # type: ignore[arg-type]
    monkeypatch.setattr("megalite.kernels.triton_recurrence", found, raising=False)
    return found


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("is_backward", [True, False])
def test_the_work_is_that_of_the_launched_kernels(
    is_delta: bool, is_backward: bool, launches: Launches
) -> None:
    q, k = (torch.zeros(B, G, S, D, dtype=torch.bfloat16) for _ in range(2))
    v, decay, rate = q.new_zeros(B, G, R, S, E), *(torch.zeros(B, G, R, S) for _ in range(2))
    arguments = q, k, v, decay, rate, None, None, is_delta
    sizes = sizes_for(q)
    call = RecurrenceCall(
        *(B * G * R, B * G, S, D, E, sizes.tokens, block_size(sizes.columns, v), 2),
        is_delta,
        is_backward,
    )
    grad = torch.zeros(B, G, R, S, E)
    with LiveBytes() as live:
        results = launch_backward(grad, None, *arguments) if is_backward else launch(*arguments)
    kernels = [each for each in call.kernels if each.flops]  # others are torch's own
    assert [programs for programs, _ in launches.found] == [each.num_programs for each in kernels]
    moved = [num_bytes for _, num_bytes in launches.found]
    if is_backward and not is_delta:
        moved[-1] -= v.nbytes  # the gradient of v is an argument, but only the delta rule reads it
    assert [each.num_bytes for each in kernels] == moved
    temporary = live.peak - sum(each.nbytes for each in results)
    assert call.workspace_bytes == pytest.approx(temporary, rel=0.02)


def test_products_of_a_chunk() -> None:
    """By the equations of kernels/triton_recurrence.py, for one chunk of one head without the delta rule."""
    call = RecurrenceCall(1, 1, 64, 128, 32, 64, 32, 2, is_delta=False, is_backward=False)
    state, keys, values = 2 * 64 * 128 * 32, 2 * 64**2 * 128, 2 * 64**2 * 32
    # (B_last W)^T E; Q W^T, its product with E, and Q S
    assert [each.flops for each in call.kernels] == [state, keys + values + state]
    backward = call._replace(is_backward=True).kernels
    # K Q^T, its product with dY; K dS', (c Q)^T dY; dY E^T, dY S^T, E dS'^T, A W, A^T Q; sums over heads
    flops = [state, keys + values, 2 * state, values + 2 * state + 2 * keys, 0]
    assert [each.flops for each in backward] == flops
