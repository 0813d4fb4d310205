"""Kernels for less than the processor has: each level is forced, and gives what the reference gives."""

import os
import subprocess
import sys

import pytest

from megalite.kernels import library

LEVELS = ("default", "avx2", "avx512")
SCRIPT = """
import torch
from megalite.kernels import activations, dropout, library, norm, rotary
from megalite.kernels.cross_entropy import cross_entropy_statistics, statistics_reference
from megalite.kernels.philox import fill_normal_, fill_reference

numbers = torch.arange(2)
for dtype in (torch.float32, torch.bfloat16):
    x = torch.linspace(-9, 9, 7 * 2 * 130).view(7, 2, 130).to(dtype)
    for name in ("gelu", "swiglu"):
        op, plain = getattr(torch.ops.megalite, f"bias_{name}"), getattr(activations, f"{name}_reference")
        torch.testing.assert_close(op(x, x[0, 0]), plain(x, x[0, 0]))
        backward, grad = getattr(torch.ops.megalite, f"bias_{name}_backward"), op(x, None)
        expected = getattr(activations, f"{name}_backward_reference")(grad, x, x[0, 0])
        for one, other in zip(backward(grad, x, x[0, 0]), expected):
            torch.testing.assert_close(one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    row = (x, x[0, 0], 1e-5)
    torch.testing.assert_close(torch.ops.megalite.rms_norm(*row), norm.rms_reference(*row))
    found, expected = torch.ops.megalite.rms_norm_backward(x, *row), norm.rms_backward_reference(x, *row)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    from megalite.kernels.dropout import reference as dropped
    site = (numbers, 0.3, 5, 1, 130)
    assert torch.equal(torch.ops.megalite.dropout(x, *site), dropped(x, *site))
    rows, targets = x.flatten(0, 1), torch.arange(14)
    torch.testing.assert_close(
        cross_entropy_statistics(rows, targets, 0, 129), statistics_reference(rows, targets, 0, 129)
    )
drawn, expected = torch.empty(1001), torch.empty(1001)
fill_normal_(drawn, 7, std=2.0)
fill_reference(expected, 2.0, 0.0, 7, 0, 1001, 1001)
assert torch.equal(drawn, expected)
print(library.implementation("dropout", "cpu"))
"""


def run(capability: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MEGALITE_CPU_CAPABILITY": capability}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("level", LEVELS[:2])
def test_each_level_gives_the_same(level: str) -> None:
    best = library.implementation("dropout", "cpu").removeprefix("compiled (").removesuffix(")")
    done = run(level)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"compiled ({min(level, best, key=LEVELS.index)})"


def test_an_unknown_level_is_refused() -> None:
    done = run("sse9")
    assert done.returncode != 0
    assert "MEGALITE_CPU_CAPABILITY=sse9 is none of default, avx2, avx512" in done.stderr
