"""What a GPU without our compiled library runs: torch.compile of the references, here on a CPU."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from megalite.kernels import activations, cross_entropy, cross_entropy_statistics, library
from megalite.kernels.library import at_run_time, compile_problem
from tests.unit.kernels.posing import ROOT

DESCRIBED = """
import sys, torch
torch.version.cuda = "13.0"
sys.modules["megalite.kernels._CUDA"] = None  # as if it were not built
from megalite.kernels import describe, library
print(describe("cuda"))
library.compile_problem = lambda device_type: ""
print(describe("cuda"))
"""
NO_LIBRARY = "not compiled when megalite was built: install it again, beside torch and with nvcc"


@pytest.fixture
def compiler() -> None:
    """Skips where torch.compile does not work."""
    if problem := compile_problem("cpu"):
        pytest.skip(problem)


def run_tests(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.compiled_at_run_time", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    assert " graphs were compiled" in done.stdout and "\n0 graphs" not in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["activations", "cross_entropy", "norm", "rotary"])
def test_operators_pass_their_tests(name: str) -> None:
    """Among them autograd, opcheck and a call from a graph of torch.compile."""
    # PyTorch's GELU, which is compiled here, has NaN as its gradient at 3e38.
    selected = "(bfloat16 or autograd or number or zeros) and not ends_of_the_number_line"
    run_tests(f"tests/unit/kernels/test_{name}.py", "-k", selected)


@pytest.mark.usefixtures("compiler")
def test_a_function_is_compiled_once_in_whichever_thread_it_runs_first() -> None:
    function = at_run_time(activations.gelu_backward_reference, device_type="cpu")
    leaves = [torch.randn(3, 5, 33, requires_grad=True) for _ in range(2)]
    bias = torch.randn(33, requires_grad=True)
    with ThreadPoolExecutor(1) as pool:  # autograd's backward has a thread of its own on a GPU
        first = pool.submit(function, leaves[0], leaves[1], bias).result()
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = function(*leaves, bias)
    for compiled, other, expected in zip(
        first, again, activations.gelu_backward_reference(*leaves, bias), strict=True
    ):
        torch.testing.assert_close(compiled, expected)
        assert torch.equal(compiled, other) and not compiled.requires_grad


def test_without_a_compiler_it_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "compile_problem", lambda device_type: "no C compiler")
    monkeypatch.delattr(torch, "compile")

    def reference(x: Tensor) -> Tensor:
        return x + 1

    def launch(x: Tensor) -> Tensor:
        raise AssertionError("nothing can compile it")

    for triton in (None, launch):
        assert at_run_time(reference, triton=triton, device_type="cpu")(torch.zeros(())) == 1


def test_start_up_names_what_compiles_the_kernels() -> None:
    done = subprocess.run([sys.executable, "-c", DESCRIBED], cwd=ROOT, capture_output=True, text=True)
    eager, at_run_time = done.stdout.splitlines()
    assert f": eager ({NO_LIBRARY}; torch.compile does not work: no GPU is visible)" in eager
    served = dict(reversed(part.split(": ", 1)) for part in at_run_time.split("; "))
    assert served == {
        f"Triton ({NO_LIBRARY})": "bias_dropout_add, causal_softmax_, dropout",
        f"torch.compile ({NO_LIBRARY})": "bias_gelu, bias_swiglu, cross_entropy_gradient_, "
        "cross_entropy_statistics, rms_norm, rotate, layer_norm",
        f"eager ({NO_LIBRARY})": "fill_normal_",
    }


@pytest.mark.usefixtures("compiler")
def test_the_gradient_of_cross_entropy_needs_no_second_tensor_of_the_logits_size() -> None:
    logits, targets = torch.randn(5, 301), torch.arange(5)
    statistics = cross_entropy_statistics(logits, targets, 0, 300)[:2]
    compiled = torch.compile(cross_entropy._replace_by_gradient)
    _, (code,) = run_and_get_code(compiled, logits, targets, statistics, torch.ones(5), 0, 300)
    assert "empty_strided_cpu(" not in code
