"""Check each operator of a train step on fake CUDA tensors, and count the operators that start a kernel."""

from __future__ import annotations

import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from megalite.observe.recorder import tensors_in
from megalite.utils.torch_private import EagerMode
from tests.fake_cuda.refusals import refuse_collective, refuse_pinning, refuse_write

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten

COPIES = (aten.copy_.default, aten._to_copy.default)
READS = (aten._local_scalar_dense.default, aten.equal.default)
NO_KERNEL = {
    *("_unsafe_view", "is_same_size", "lift_fresh", "set_"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operators of aten that start no kernel, besides views."""


class DeviceChecks(EagerMode):
    """Checks operators on fake tensors.

    Attributes:
        mixed: operators with tensors of the host and of the device.
        waits: what lets the host wait for the device while `watches_waits` is set.
        num_launched: number of operators in `launches` before each of these waits.
        pageable: copies that must not wait, of host memory that is not pinned: CUDA waits in them.
        launches: numbers of operators on the device, by phase and name.
        phase: the phase that operators count for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.reset()

    def reset(self) -> None:
        """Start the checks of other train steps."""
        self.mixed: list[str] = []
        self.waits: list[str] = []
        self.num_launched: list[int] = []
        self.pageable: list[str] = []
        self.watches_waits = False
        self.phase = "setup"
        self.launches: dict[str, Counter[str]] = defaultdict(Counter)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Check all operators in this block, where new tensors are fake."""
        with self._fakes, self:
            yield

    def pin(self, memory: Tensor) -> None:
        """Regard host memory as pinned."""
        refuse_pinning(memory, is_on_device=_is_on_device(memory))
        storage = memory.untyped_storage()
        self._pinned[storage._cdata] = weakref.ref(storage)

    def is_pinned(self, memory: Tensor) -> bool:
        storage = memory.untyped_storage()
        reference = self._pinned.get(storage._cdata)
        return reference is not None and reference() is storage

    def wait(self, what: str) -> None:
        """Note that the host waits for the device."""
        if self.watches_waits:
            self.waits.append(f"{what} in {self.phase} by {_caller()}")
            self.num_launched.append(sum(counts.total() for counts in self.launches.values()))

    def executor(self, *_: object, **__: object) -> InlineExecutor:
        """Return what stands for a ThreadPoolExecutor."""
        return InlineExecutor(self)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            refuse_pinning(args[0], is_on_device=_is_on_device(args[0]))
            pinned = torch.empty_like(args[0])
            self.pin(pinned)
            return pinned
        if func is aten.record_stream.default:
            return None
        if func is aten.addmm.dtype_out:  # not for fake tensors in torch 2.11
            return kwargs["out"]
        tensors = tensors_in((args, kwargs))
        if func in READS:
            return self._read(func, args, tensors)
        if func.namespace == "c10d":
            refuse_collective(
                _name(func).removeprefix("c10d."), args, [_is_on_device(each) for each in tensors]
            )
        else:
            self._check_devices(func, tensors)
            refuse_write(func, args, kwargs)
        out = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self.pin(out)
        if func in COPIES:
            self._check_copy(func, args, kwargs, out)
        starts_kernel = not func.is_view and _name(func) not in NO_KERNEL
        if starts_kernel and any(map(_is_on_device, [*tensors, *tensors_in(out)])):
            self.launches[self.phase][_name(func)] += 1
        return out

    def _read(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """Return a value to the host; an unknown one is 1, with which trials and updates succeed."""
        if any(map(_is_on_device, tensors)):
            self.wait(_name(func))
        try:
            return func(*args)
        except DataDependentOutputException:
            return 1.0 if tensors[0].dtype.is_floating_point else 1

    def _check_devices(self, func: Any, tensors: Sequence[Tensor]) -> None:
        on_host = [tensor for tensor in tensors if not _is_on_device(tensor)]
        if func in COPIES or len(on_host) in (0, len(tensors)):
            return
        # A scalar on the host becomes an argument of the kernel. Our operators only read keys this way.
        is_aten = func.namespace == "aten"
        if all(tensor.dim() == 0 and (is_aten or tensor.dtype == torch.int64) for tensor in on_host):
            return
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in on_host)
        self.mixed.append(f"{_name(func)} with {shapes} on the host in {_caller()}")

    def _check_copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Note a copy between host and device for which the host waits."""
        in_place = func is aten.copy_.default
        source = args[1] if in_place else args[0]
        if _is_on_device(source) == _is_on_device(out):
            return
        is_async = (len(args) > 2 and args[2]) if in_place else kwargs.get("non_blocking", False)
        is_pinned = self.is_pinned(out if _is_on_device(source) else source)
        if not (is_async and is_pinned):
            kind = f"{'non-blocking' if is_async else 'blocking'} copy"
            memory = f"{'pinned' if is_pinned else 'pageable'} memory"
            what = f"{kind} with {memory} of {out.dtype} {list(out.shape)} to {out.device}"
            self.wait(what)
            if is_async:
                self.pageable.append(f"{what} by {_caller()}")


class InlineExecutor:
    """Runs at once what a ThreadPoolExecutor would run in a thread, which may wait for the device."""

    def __init__(self, checks: DeviceChecks) -> None:
        self._checks = checks

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        watched, self._checks.watches_waits = self._checks.watches_waits, False
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        self._checks.watches_waits = watched
        return done

    def shutdown(self, *_: object, **__: object) -> None: ...


def _is_on_device(tensor: Tensor) -> bool:
    # A fake tensor's `device` is an operator.
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type == "cuda"


def _name(func: Any) -> str:
    """Return an operator's name without its overload, such as ``add_`` or ``megalite.rotate``."""
    return str(func.overloadpacket).removeprefix("aten.")


def _caller() -> str:
    """Return the function of megalite that runs, such as ``megalite/optim/adamw.py:200 (step)``."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "megalite"):
            return f"{path.relative_to(ROOT)}:{frame.lineno} ({frame.name})"
    return "PyTorch's backward"
