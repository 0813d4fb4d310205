"""Private names of torch: one module uses them, and each still does what it is used for."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from megalite.config import ParallelConfig
from megalite.distributed.topology import Topology
from megalite.model.grouped_linear import grouped_linear
from megalite.observe.meta_tensors import fused_attention
from megalite.observe.operator_log import _ATTENTION, OperatorLog
from megalite.utils import torch_private
from tests.programs import run_program

ROOT = Path(__file__).parents[3] / "megalite"
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.name != "torch_private.py"]
STANDARD_LIBRARY = {
    *("_asdict", "_fields", "_replace"),  # of named tuples
    *("_current_frames", "_exit", "_run_exitfuncs", "_TemporaryFileWrapper"),
    *("_get_values", "_match_argument", "_option_string_actions"),  # of argparse.ArgumentParser
}
TORCH_BASES = (nn.Module, torch.autograd.Function, torch.optim.Optimizer, torch_private.TorchDispatchMode)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _private_names_of_torch(tree: ast.AST, known: Collection[str]) -> Iterator[str]:
    """Yield the private names that a module uses, but those that megalite or the standard library defines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names = [node.value]  # a module that is imported by its name
        yield from (name for name in names if name.startswith("torch.") and _is_private(name))
        is_private = isinstance(node, ast.Attribute) and _is_private(node.attr)
        if is_private and (_root(node) == "torch" or node.attr not in known):
            yield ast.unparse(node)


def _root(node: ast.AST) -> str:
    """Return the first name of a chain of attributes, calls and subscripts."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_other_module_uses_or_overrides_a_private_name_of_torch() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}  # takes seconds: one test
    ours = {name for tree in trees.values() for name in _defined(tree) if _is_private(name)}
    used = {
        str(path.relative_to(ROOT)): list(_private_names_of_torch(tree, ours | STANDARD_LIBRARY))
        for path, tree in trees.items()
        if path.parent.name != "adapters" and path.parents[1].name != "adapters"  # private names of packages
    }
    assert not {path: names for path, names in used.items() if names}
    of_torch = {name for base in TORCH_BASES for name in dir(base) if _is_private(name)} & ours
    nodes = (node for tree in trees.values() for node in ast.walk(tree)) if of_torch else ()
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    assert not [(each.name, name) for each in classes for name in _defined(each) if name in of_torch]


@pytest.mark.parametrize(
    "code",
    [
        "from torch._C import x",
        "from torch.distributed.distributed_c10d import _get_default_store",
        "import torch._dynamo",
        "torch.cuda.memory._snapshot()",
        "group._get_backend()",
        "MODULES = ('torch._dynamo',)",
    ],
)
def test_private_names_are_found(code: str) -> None:
    assert list(_private_names_of_torch(ast.parse(code), STANDARD_LIBRARY))


def test_every_entry_is_run_below() -> None:
    entries = {
        name
        for node in ast.parse(Path(torch_private.__file__).read_text(encoding="utf-8")).body
        for name in _defined(node if isinstance(node, ast.Assign) else ast.Module([node], []))
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or name == node.name
    }
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch_private"
    }
    assert entries | {"TorchDispatchMode", "tree_leaves"} == used - {"__file__"}


def test_lists_of_tensors() -> None:
    x = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    assert [float(norm) for norm in torch_private.foreach_norm(x)] == [5.0, 2.0]
    torch_private.foreach_mul_(x, torch.tensor(2.0))
    torch_private.foreach_div_(x, torch.tensor(4.0))
    assert [each.tolist() for each in x] == [[1.5, 2.0], [1.0]]
    copies = [torch.empty(2, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16)]
    torch_private.foreach_copy_(copies, x)
    assert [each.tolist() for each in copies] == [[1.5, 2.0], [1.0]]
    torch_private.foreach_add_(copies, [each.bfloat16() for each in x])
    assert [each.tolist() for each in copies] == [[3.0, 4.0], [2.0]]
    torch_private.foreach_zero_(x)
    assert not any(each.any() for each in x)


def test_the_fused_step_is_that_of_adamw() -> None:
    torch.manual_seed(1)
    weight = torch.randn(7)
    parameter, gradient = nn.Parameter(weight.clone()), torch.randn(7)
    expected = torch.optim.AdamW(
        [parameter], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    parameter.grad = gradient * 2.0
    expected.step()
    moments = torch.zeros(7), torch.zeros(7)
    torch_private.fused_adamw_(
        [weight],
        [gradient * 4.0],
        *([moment] for moment in moments),
        [],
        [torch.tensor(1.0)],
        lr=0.1,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(2.0),
        found_inf=torch.tensor(0.0),
    )
    assert torch.equal(weight, parameter.detach())


def test_products_in_8_bits() -> None:
    a, b = torch.full((16, 32), 2.0), torch.full((16, 32), 0.5)
    numbers = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    scales = {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(4.0)}
    y = torch_private.scaled_mm(*numbers, **scales, bias=None, out_dtype=torch.bfloat16, use_fast_accum=True)
    assert torch.equal(y, torch.full((16, 16), 64.0, dtype=torch.bfloat16))


def test_an_unsafe_view_may_be_changed_in_place() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch_private.unsafe_view(x * 2.0, (2, 3))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.reshape(6) * 2.0

    x = torch.ones(6, requires_grad=True)
    y = Doubled.apply(x)
    y.add_(1.0).sum().backward()
    assert y.shape == (2, 3)
    assert x.grad is not None and x.grad.tolist() == [2.0] * 6


def test_attention_kernels() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(torch_private.unfused_attention(q, k, v, None, 0.0, True)[0], expected)
    out, logsumexp = torch_private.cpu_attention(q, k, v, 0.0, True)
    torch.testing.assert_close(out, expected)
    grads = torch_private.cpu_attention_backward(torch.ones_like(out), q, k, v, out, logsumexp, 0.0, True)
    assert [each.shape for each in grads] == [q.shape] * 3
    selected = torch_private.selected_attention(q, k, v, None, 0.0, True, enable_gqa=False)
    assert SDPBackend(selected) in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    half = [each.to("meta", torch.bfloat16) for each in (q, k, v)]
    assert torch_private.flash_attention(*half, 0.0, True, scale=None)[0].shape == q.shape
    mask = torch.empty(2, 3, 5, 5, dtype=torch.bfloat16, device="meta")
    assert torch_private.efficient_attention(*half, mask, True, 0.0, False, scale=None)[0].shape == q.shape


@pytest.mark.parametrize(("has_mask", "is_causal"), [(False, True), (True, False)])
def test_backward_of_attention_has_its_arguments_where_records_expect_them(
    has_mask: bool, is_causal: bool
) -> None:
    q, k = (torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "qk")
    mask = torch.empty(2, 3, 5, 5, dtype=torch.bfloat16, device="meta") if has_mask else None
    name = "efficient_attention_backward" if has_mask else "flash_attention_backward"
    operators = {
        "efficient_attention_backward": torch_private.efficient_attention_backward,
        "flash_attention_backward": torch_private.flash_attention_backward,
    }
    arguments = schema_names(operators[name])
    index = _ATTENTION[operators[name]]
    assert arguments[index.first : index.first + 2] == ["query", "key"]
    assert (arguments[index.is_causal], arguments[index.dropout]) == ("is_causal", "dropout_p")
    with OperatorLog(Topology.on_paper({})) as log:
        fused_attention(q, k, k, mask, is_causal=is_causal).sum().backward()
    calls = log.take().attention
    assert [call.is_backward for call in calls] == [False, True]
    assert all(call.is_causal == is_causal and call.scores == 150 / (1 + is_causal) for call in calls)


def test_grouped_gemms_are_recorded_as_a_batch() -> None:
    assert schema_names(torch_private.grouped_mm)[:3] == ["self", "mat2", "offs"]
    assert schema_names(torch_private.scaled_mm_operator)[:2] == ["self", "mat2"]
    x = torch.empty(24, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(4, 8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    with OperatorLog(Topology.on_paper({})) as log:
        grouped_linear(x, weight, ends).sum().backward()
    gemms = [gemm[:5] for gemm in log.take().gemms]
    assert gemms == [(6, 8, 16, 4, 2), (6, 16, 8, 4, 2), (8, 16, 6, 4, 2)]


def schema_names(operator: Any) -> list[str]:
    return [argument.name for argument in torch_private.schema_of(operator.default).arguments]


def test_modes_see_reads_of_scalars_and_their_schemas() -> None:
    seen: Counter[str] = Counter()

    class Counted(torch_private.EagerMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[torch_private.schema_of(func).name] += 1
            if func is torch_private.read_scalar:
                return 5.0
            return func(*args, **(kwargs or {}))

    assert issubclass(torch_private.EagerMode, torch_private.TorchDispatchMode)
    with Counted():
        assert torch.ones(1).item() == 5.0
    assert seen == {"aten::ones": 1, "aten::_local_scalar_dense": 1}
    assert "_should_skip_dynamo" in dir(torch_private.TorchDispatchMode)  # which EagerMode overrides


def test_nested_arguments() -> None:
    assert torch_private.tree_leaves(((1, [2, None]), {"a": 3})) == [1, 2, None, 3]


def test_kernels_are_registered_and_taken_back() -> None:
    with torch_private.scoped_library("aten", "IMPL") as library:
        library.impl("relu", lambda x: x + 7.0, "AutogradMeta")
        assert torch_private.has_kernel("aten::relu", "AutogradMeta")
    assert not torch_private.has_kernel("aten::relu", "AutogradMeta")
    assert torch_private.has_kernel("aten::relu", "CPU")


def test_gloo_does_not_warn_of_nccls_options(tmp_path: Path) -> None:
    """A group of gloo and NCCL is split with NCCL's options. C++ code of gloo warns once in a process."""
    split = f"""
import datetime, sys, torch.distributed as dist
from torch._C._distributed_c10d import Backend
from contextlib import nullcontext
from megalite.utils.torch_private import {torch_private.without_cpp_warnings.__name__} as quietly
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
limit = datetime.timedelta(seconds=9)
options = Backend.Options("not gloo", limit)
with quietly() if sys.argv[1:] else nullcontext():
    dist.group.WORLD.split_group([0], timeout=limit, opts=options, group_name="x", group_desc="x")
dist.destroy_process_group()
"""
    (tmp_path / "split.py").write_text(split)
    printed = []
    for more in ((), ("quietly",)):
        done = run_program(tmp_path / "split.py", *more)
        assert done.returncode == 0
        printed.append(done.stderr)
    assert "Tried to pass options to ProcessGroupGloo::split" in printed[0]
    assert printed[1] == ""


def test_storages_have_numbers() -> None:
    x, y = torch.empty(6, device="meta"), torch.empty(6, device="meta")
    number = torch_private.storage_number(x.untyped_storage())
    assert number == torch_private.storage_number(x.view(2, 3).untyped_storage())
    assert number != torch_private.storage_number(y.untyped_storage())
    version = torch_private.version_of(x)
    x.view(-1)[0] = 1.0
    assert torch_private.version_of(x) > version


def test_nodes_are_numbered_in_order() -> None:
    x = torch.ones(2, requires_grad=True)
    first = (x * 2.0).grad_fn
    between = torch_private.next_node_number()
    second = (x * 2.0).grad_fn
    assert first is not None and second is not None
    assert torch_private.node_number(first) < between <= torch_private.node_number(second)


def test_the_profiler_takes_its_options() -> None:
    options, cpu = torch_private.profiler_options(verbose=True), torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], experimental_config=options):
        torch.ones(1)


def test_memory_history_is_called_as_torch_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {}
    for name in ("_record_memory_history", "_dump_snapshot"):
        calls[name] = create_autospec(getattr(torch.cuda.memory, name))
        monkeypatch.setattr(torch.cuda.memory, name, calls[name])
    torch_private.start_memory_history()
    torch_private.save_memory_history("snapshot.pickle")
    torch_private.stop_memory_history()
    assert calls["_record_memory_history"].call_count == 2
    assert calls["_dump_snapshot"].call_count == 1


class _Names(TorchFunctionMode):
    """Mode that records the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_hooks_of_a_backward_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: gradient.neg())
    with _Names() as mode, torch_private.backward_within(mode):
        x.sum().backward()
    assert mode.names[-1] == "neg"


def test_compilations_are_observed() -> None:
    events: list[str] = []
    __import__(torch_private.COMPILER)
    begin, end = (lambda _: events.append("begin")), (lambda _: events.append("end"))
    with torch_private.compilations_observed(begin, end):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert events == ["begin", "end"]


def test_compiled_code_is_forgotten() -> None:
    events = list[str]()
    __import__(torch_private.COMPILER)
    compiled = torch.compile(lambda x: x + 2, backend="eager")
    with torch_private.compilations_observed(lambda _: events.append("begin"), lambda _: None):
        for _ in range(2):
            compiled(torch.ones(1))
        assert events == ["begin"]
        torch_private.forget_compiled_code()
        compiled(torch.ones(1))
    assert events == ["begin", "begin"]


def test_groups_of_the_fake_backend_run_on_added_devices() -> None:
    devices = torch_private.fake_backend_devices()
    assert {"cpu", "cuda"} <= set(devices)
    with Topology.fake(ParallelConfig().mesh, 1, 0):
        assert "meta" in devices and devices is torch_private.fake_backend_devices()


def test_all_process_groups_of_a_process_with_a_gpu_are_aborted(monkeypatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch_private.abort_process_groups()
    assert dist.is_initialized() != torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch_private.abort_process_groups()
    assert not dist.is_initialized()


def test_groups_without_a_process_group() -> None:
    """Run a collective on a meta tensor in a group that torch.distributed does not know."""
    groups = [torch_private.fake_group(name, size) for name, size in (("tp", 4), ("pp", 2))]
    assert [(group.group_name, group.size(), group.rank()) for group in groups] == [
        ("tp", 4, 0),
        ("pp", 2, 0),
    ]
    x = torch.ones(3, device="meta")
    assert dist.all_reduce(x, group=groups[0]) is None
    assert not dist.is_initialized()


def test_groups_count_and_record_collectives(one_rank: Topology) -> None:
    group = one_rank.world.group
    before = torch_private.num_collectives(group)
    dist.all_reduce(torch.ones(1), group=group)
    assert torch_private.num_collectives(group) == before + 1
    recorders = {kind: torch_private.flight_recorder(kind) for kind in ("cpu", "cuda", "meta")}
    assert recorders["meta"] is None
    assert recorders["cpu"] is None or recorders["cpu"](includeStackTraces=False)


def test_gemms_with_collectives_in_symmetric_memory() -> None:
    """Only GPUs compute them. On the meta device torch checks the arguments and infers the shapes."""
    dist.init_process_group("fake", rank=1, world_size=4)
    try:
        group, matrix = dist.group.WORLD, torch.empty(8, 5, device="meta")
        gathered, y = torch_private.all_gather_gemm(
            torch.empty(2, 3, 8, device="meta"), matrix, group, keeps_gathered=True
        )
        assert gathered is not None
        assert (gathered.shape, y.shape) == ((8, 3, 8), (8, 3, 5))
        total = torch_private.gemm_reduce_scatter(torch.empty(8, 3, 8, device="meta"), matrix, group)
        assert total.shape == (2, 3, 5)
    finally:
        dist.destroy_process_group()
    schemas = {
        name: str(torch_private.schema_of(getattr(torch.ops.symm_mem, name).default)) for name in OPERATORS
    }
    assert schemas == {name: f"symm_mem::{name}{arguments}" for name, arguments in OPERATORS.items()}
    assert all(torch_private.has_kernel(f"symm_mem::{name}", "CUDA") for name in OPERATORS)


OPERATORS = {
    "fused_all_gather_matmul": (
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)"
        " -> (Tensor?, Tensor[])"
    ),
    "fused_matmul_reduce_scatter": (
        "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor"
    ),
}


def test_context_parallelism_of_dtensors_can_be_disabled() -> None:
    dispatcher = import_module("torch.distributed.tensor").DTensor._op_dispatcher
    attention = import_module("torch.distributed.tensor.experimental._attention")
    attention._enable_context_parallel_dispatcher()
    assert torch_private.flash_attention.default in dispatcher._custom_op_handlers
    torch_private.disable_context_parallelism()
    assert torch_private.flash_attention.default not in dispatcher._custom_op_handlers
