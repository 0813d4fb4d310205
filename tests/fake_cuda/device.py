"""A CUDA device without a GPU, for FakeTensorMode: tensors with shapes, dtypes and a device, without values.

`guard.cpp` answers what PyTorch's C++ code asks of a device, and this module what Python code asks. A process
cannot remove the device, so that tests install it in a child process. The device must be loaded before torch:
this module imports torch where it uses it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fake_cuda.checks import DeviceChecks

FOLDER = Path(__file__).parent
REGISTRATIONS = FOLDER.parents[1] / "csrc" / "cuda" / "bindings.cpp"


def build_library(path: Path) -> Path:
    """Compile `guard.cpp` into a library of this path, for the torch that Python would import."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", f"-isystem{torch / 'include'}"]
    links = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", *flags, str(FOLDER / "guard.cpp"), *links, "-o", str(path)], check=True)
    return path


def load(library: Path) -> ctypes.CDLL:
    """Load the library into this process, before it imports torch, which would keep its own CUDA hooks."""
    guard = ctypes.CDLL(str(library))
    guard.current_stream_id.restype = ctypes.c_longlong
    return guard


def install(guard: ctypes.CDLL, checks: DeviceChecks) -> None:
    """Make CUDA tensors work under FakeTensorMode, and let the checks see all that is done with them."""
    import torch

    guard.install_guard()  # after torch, which may have installed its own
    for name, value in _torch_cuda(guard.current_stream_id, checks.wait).items():
        setattr(torch.cuda, name, value)
    _replace_operators()
    _replace_groups()
    _replace_memory(checks)
    _replace_threads(checks)


def _torch_cuda(current_stream_id: Callable[[], int], on_wait: Callable[[str], None]) -> dict[str, Any]:
    """Return the names of `torch.cuda` that megalite uses.

    Args:
        on_wait: called with the name of a function that lets the host wait for the device.
    """
    import torch

    device = torch.device("cuda", 0)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
            return super().__new__(cls, device, enable_timing=enable_timing)

        def synchronize(self) -> None:
            on_wait("torch.cuda.Event.synchronize")

    class Stream(torch.Stream):
        def __new__(cls, _: Any = None, priority: int = 0, **number: int) -> Stream:
            arguments: dict[str, Any] = number or {"device": device, "priority": priority}
            return super().__new__(cls, **arguments)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            on_wait("torch.cuda.Stream.synchronize")

    def current_stream(_: Any = None) -> Stream:
        return Stream(stream_id=current_stream_id(), device_index=0, device_type=1)

    @contextmanager
    def stream(used: Stream | None) -> Iterator[None]:
        if used is None:
            yield
        else:
            with used:
                yield

    gpu = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
    )
    return {
        "Event": Event,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": current_stream,
        "device_count": lambda: 1,
        "get_device_capability": lambda _=None: (gpu.major, gpu.minor),
        "get_device_name": lambda _=None: gpu.name,
        "get_device_properties": lambda _=None: gpu,
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "is_initialized": lambda: True,
        "manual_seed": lambda _: None,
        "set_device": lambda _: None,
        "set_rng_state": lambda *_: None,
        "stream": stream,
        "synchronize": lambda _=None: on_wait("torch.cuda.synchronize"),
    }


def _replace_operators() -> None:
    """Choose operators as if the CUDA library were loaded, and the attention that a GPU would run.

    FakeTensorMode calls the fake implementations of operators, never these.
    """
    import torch

    from megalite.kernels import library
    from megalite.observe.meta_tensors import fused_attention
    from megalite.utils.torch_private import has_kernel

    def without_gpu(*_: object) -> None:
        raise AssertionError("an operator runs outside of FakeTensorMode")

    library._AT_RUN_TIME.clear()
    for name in re.findall(r'library\.impl\("(\w+)"', REGISTRATIONS.read_text()):
        if not has_kernel(f"megalite::{name}", "CUDA"):
            torch.library.impl(f"megalite::{name}", "CUDA", without_gpu)
    torch.library.impl("aten::scaled_dot_product_attention", "AutogradCUDA", fused_attention)


def _replace_groups() -> None:
    """Make groups of the fake backend where a GPU has groups of NCCL."""
    import torch.distributed as dist

    from megalite.distributed import axis

    def split_group(split_ranks: list[list[int]], group_desc: str) -> dist.ProcessGroup | None:
        return dist.new_subgroups_by_enumeration(split_ranks, group_desc=group_desc)[0]

    dist.split_group = split_group
    axis.group_options = lambda *_: None


def _replace_memory(checks: DeviceChecks) -> None:
    """Replace memory that the system maps and CUDA pins with fake tensors."""
    import torch

    from megalite.optim import staging, state_storage
    from megalite.utils.hardware import host_memory

    def allocate_bytes(num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    for module in (host_memory, staging, state_storage):
        for name, value in (("allocate_bytes", allocate_bytes), ("pin", checks.pin)):
            if hasattr(module, name):
                setattr(module, name, value)


def _replace_threads(checks: DeviceChecks) -> None:
    """Run the work of threads at once: a thread would not have the modes of the thread that starts it."""
    from megalite.data import batch_loader
    from megalite.optim import offload

    for module in (batch_loader, offload):
        module.ThreadPoolExecutor = checks.executor  # type: ignore[attr-defined]
