"""Find races over CUDA streams without a GPU: tensors of the CPU pose as tensors of the device.

    with StreamChecker() as checker:
        step()  # unchanged code for `checker.device`
    print(checker.report())

Operators run at once and compute real values. The checker records which storages each of them reads and
writes, and on which stream. Streams, events, collectives and threads have vector clocks, as in detectors of
data races between threads (Lamport 1978; FastTrack, Flanagan and Freund 2009). At the end of the block a
`StreamOrderError` has a line for

- each pair of accesses to the same bytes, at least one of them a write, without an order between them;
- each tensor whose memory is freed while another stream may still use it: the caching allocator gives the
  memory to the next tensor of the stream that allocated it. `record_stream` prevents this;
- pinned memory that is unpinned before the copies from and to it have ended.

An operator on a tensor whose storage was resized to nothing raises the error at once.

The order must follow from the program, so a race is found whatever the timing. The model:

    a kernel                       starts after its stream's earlier work and what its host thread has seen
    a copy, pinned memory          is such a kernel; if it blocks, the host then waits for its stream
    a copy, pageable memory        the host waits for its stream
    item(), nonzero(), equal()     the host waits for its stream
    storage.resize_                gives the memory back, or allocates it from the current stream's
    a collective                   runs on its process group's stream, after the current stream's work;
                                   `wait` lets the current stream wait and drops its references to the tensors
    ThreadPoolExecutor, Thread, threading.Event     order the host threads

Not modelled: captured graphs, memory that processes share, and the values that other ranks send (a rank
receives its own values, or zeros). The bytes between the elements of a strided view count as used.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = str(Path(__file__).parents[1])
DEVICE = torch.device("cuda", 0)
_LIBRARIES = tuple({str(Path(module.__file__ or "").parent) for module in (torch, threading)})


class StreamOrderError(AssertionError):
    """Raised at the end of a checker's block for accesses and frees without an order."""


class Memory(Enum):
    """What a storage poses as."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"


class Timeline:
    """A sequence of work in order: a stream's or a host thread's.

    Attributes:
        clock: by timeline, how many of its accesses happen before the next one here.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[Timeline, int] = {}
        self.num_waits = 0

    @property
    def time(self) -> int:
        """Return the number of accesses so far."""
        return self.clock.get(self, 0)

    def tick(self) -> int:
        self.clock[self] = self.time + 1
        return self.time

    def join(self, clock: Mapping[Timeline, int]) -> None:
        """Let what follows happen after everything that `clock` counts."""
        for timeline, time in clock.items():
            if self.clock.get(timeline, 0) < time:
                self.clock[timeline] = time


class Access(NamedTuple):
    """An access to the bytes [start, end) of a storage."""

    what: str
    place: str
    timeline: Timeline
    time: int
    start: int
    end: int
    is_write: bool

    def __str__(self) -> str:
        kind = "written" if self.is_write else "read"
        return f"{kind} by {self.what} on {self.timeline.name} at {self.place}"


class TrackedStorage:
    """The accesses to a storage that later ones can still be in conflict with.

    Attributes:
        stream: stream that allocated it, to which its memory returns.
        recorded: streams passed to `record_stream`, which the allocator waits for.
    """

    def __init__(self, kind: Memory, storage: torch.UntypedStorage, stream: Timeline, place: str) -> None:
        self.kind = kind
        self.address, self.num_bytes = storage.data_ptr(), storage.nbytes()
        self.stream = stream
        self.place = place
        self.recorded: set[Timeline] = set()
        self.accesses: list[Access] = []

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes of {self.kind.value} memory from {self.place}"

    def unordered(self, clock: Mapping[Timeline, int]) -> Iterator[Access]:
        """Yield the accesses that may happen after what `clock` counts."""
        return (each for each in self.accesses if clock.get(each.timeline, 0) < each.time)

    def add(self, new: Access) -> Iterator[Access]:
        """Yield the earlier accesses with which a new one is in conflict, and keep it."""
        clock = new.timeline.clock
        for old in self.unordered(clock):
            if (old.is_write or new.is_write) and old.start < new.end and new.start < old.end:
                yield old
        self.accesses = [old for old in self.accesses if not _replaces(new, old)]
        self.accesses.append(new)


def _replaces(new: Access, old: Access) -> bool:
    """Return whether everything that is ordered with `new` is ordered with an earlier access too."""
    is_inside = new.start <= old.start and old.end <= new.end
    return is_inside and (new.is_write or (old.timeline is new.timeline and not old.is_write))


class StreamChecker:
    """Checks the order of memory accesses over streams in a ``with`` block; see the module's docstring.

    Attributes:
        device: the device whose tensors are recorded; pass it to the code.
        errors: what is reported at the end of the block, by the two source lines.
        files: files of the project that used streams, events, collectives or copies without a wait.
    """

    device = DEVICE

    def __init__(self) -> None:
        self.errors: dict[tuple[str, ...], str] = {}
        self.files: set[str] = set()
        self._default = _Stream(self, "the default stream")
        self._streams = [self._default]
        self._group_streams: dict[dist.ProcessGroup, Timeline] = {}
        self._storages: dict[int, TrackedStorage] = {}
        self._resized = weakref.WeakKeyDictionary[torch.UntypedStorage, int]()  # largest sizes
        self._pinned: dict[int, int] = {}  # sizes of registered host memory by address
        self._batches: dict[dist.ProcessGroup, list[tuple[str, list[Tensor], list[Tensor]]]] = {}
        self._in_flight: set[_Work] = set()  # their tensors are kept until `wait`
        self._local = threading.local()
        self._lock = threading.RLock()
        self._is_open = False
        self._stack = ExitStack()

    def __enter__(self) -> StreamChecker:
        self._is_open = True
        for patch in (*self._cuda(), *self._tensors(), *self._collectives(), *self._threads()):
            self._stack.enter_context(patch)
        self._stack.enter_context(mock.patch.object(ctypes, "memmove", self._memmove(ctypes.memmove)))
        self._stack.enter_context(self._modes())
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        self._stack.close()
        for storage, num_bytes in self._resized.items():
            storage.resize_(num_bytes)  # an error's report prints tensors
        if error_type is None and self.errors:
            raise StreamOrderError("\n".join(self.errors.values()))

    def report(self) -> str:
        """Return a line for each stream: what it is, and how much it ran and waited."""
        return "\n".join(
            f"{stream.name}: {stream.time} operators, {stream.num_waits} waits" for stream in self._streams
        )

    # Timelines

    def host(self) -> Timeline:
        """Return the timeline of this thread."""
        if not hasattr(self._local, "host"):
            self._local.host = Timeline(f"host thread {threading.current_thread().name}")
        found: Timeline = self._local.host
        return found

    def current_stream(self, _: object = None) -> Timeline:
        """Return this thread's current stream."""
        return getattr(self._local, "stream", self._default)

    def new_stream(self, name: str = "") -> _Stream:
        self._touch()
        stream = _Stream(self, name or f"stream {len(self._streams)} of {_place()}")
        self._streams.append(stream)
        return stream

    def marked(self, timeline: Timeline) -> dict[Timeline, int]:
        """Return the clock of everything queued so far on a stream and seen by this thread."""
        both = Timeline("")
        both.join(timeline.clock)
        both.join(self.host().clock)
        return both.clock

    def wait(self, timeline: Timeline, clock: Mapping[Timeline, int]) -> None:
        """Let a stream's later work, or the host, wait."""
        self._touch()
        timeline.num_waits += 1
        timeline.join(clock)

    @contextmanager
    def on(self, stream: Timeline | None) -> Iterator[None]:
        """Make a stream current in this thread."""
        before = self.current_stream()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def _touch(self) -> None:
        file = _place().rpartition(":")[0]
        if file.startswith("megalite/"):
            self.files.add(file)

    # Storages

    def storage(self, tensor: Tensor, kind: Memory | None = None) -> TrackedStorage:
        """Return the record of a tensor's storage; a new one poses as `kind`, or as host memory."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            address = storage.data_ptr()
            if any(start <= address < start + size for start, size in self._pinned.items()):
                kind = Memory.PINNED
            new = TrackedStorage(kind or Memory.HOST, storage, self.current_stream(), _place())
            self._storages[key] = new
            weakref.finalize(storage, self._free, key).atexit = False
        return self._storages[key]

    def is_on_device(self, tensor: Tensor) -> bool:
        return self.storage(tensor).kind is Memory.DEVICE

    def _free(self, key: int) -> None:
        self._give_back(self._storages.pop(key))

    def _give_back(self, storage: TrackedStorage) -> None:
        """Report the accesses to freed memory that may not have ended."""
        if not self._is_open or storage.kind is not Memory.DEVICE:
            return
        with self._lock:
            for access in storage.unordered(self.marked(storage.stream)):
                if access.timeline not in storage.recorded:
                    self._fail(
                        access,
                        f"{storage} are freed at {_place()} and return to {storage.stream.name}, but are "
                        f"still {access}: keep the tensor until then, or call record_stream",
                    )

    def _resizes(self, resize: Callable[..., None]) -> Callable[..., None]:
        """Return `UntypedStorage.resize_`, which only frees or allocates memory of the device."""

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> None:
            self._touch()
            known = self._storages.get(storage._cdata)
            if known is not None and known.kind is Memory.DEVICE:
                assert 0 in (known.num_bytes, num_bytes), "resize_ would copy the elements"
                self._give_back(known)
                self._resized[storage] = max(known.num_bytes, num_bytes)
            resize(storage, num_bytes)
            if known is not None:
                new = TrackedStorage(known.kind, storage, self.current_stream(), _place())
                self._storages[storage._cdata] = new

        return resized

    def check_memory(self, func: Any, tree: Any) -> None:
        """Raise an error if an operator would access tensors that have no memory."""
        if func.is_view or func._schema.name.removeprefix("aten::").startswith(_WITHOUT_ACCESS):
            return
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
                storage = self.storage(tensor)
                if storage.kind is Memory.DEVICE and not storage.num_bytes:
                    raise StreamOrderError(f"{func} at {_place()} uses memory freed at {storage.place}")

    def access(
        self, timeline: Timeline, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]
    ) -> None:
        """Record that the next work of a timeline reads and writes tensors."""
        place, time = _place(), timeline.tick()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    start, end = _byte_range(tensor)
                    new = Access(what, place, timeline, time, start, end, is_write)
                    self._add(self.storage(tensor), new)

    def _add(self, storage: TrackedStorage, new: Access) -> None:
        for old in storage.add(new):
            self._fail(old, f"{storage} are {new}, without waiting until they are {old}", new.place)

    def _fail(self, access: Access, message: str, place: str = "") -> None:
        self.errors.setdefault((access.place, place or _place()), message)

    # Operators

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with _Recorder(self):
            yield

    @contextmanager
    def making(self, kind: Memory | None) -> Iterator[None]:
        """Let new tensors pose as `kind`."""
        before, self._local.made = getattr(self._local, "made", None), kind
        try:
            yield
        finally:
            self._local.made = before

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record an operator that this thread has run or queued."""
        reads, writes = _arguments(func, args, kwargs)
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if any(each.is_meta for each in (*reads, *writes, *outputs)):
            return
        made: Memory | None = getattr(self._local, "made", None)
        given = {self.storage(each) for each in (*reads, *writes)}
        is_on_device = any(each.kind is Memory.DEVICE for each in given)
        name = func._schema.name.removeprefix("aten::")
        kind = made or (Memory.DEVICE if is_on_device else Memory.HOST)
        fresh = [each for each in outputs if self.storage(each, kind) not in given]
        if _only_views(func, name, writes, fresh, outputs):
            return
        if name.endswith("_like") or name.startswith("new_"):
            reads = []
        if not name.startswith(("empty", "new_empty", "resize_")):
            writes += fresh
        kinds = {self.storage(each).kind for each in (*reads, *writes)}
        if Memory.DEVICE not in kinds:
            self.access(self.host(), name, reads, writes)
        elif name in ("copy_", "_to_copy") and len(kinds) > 1:
            is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            self._copy(name, reads, writes, waits=not is_async or Memory.HOST in kinds)
        else:
            scalars = [each for each in reads if self.storage(each).kind is not Memory.DEVICE]
            for each in (*scalars, *writes):  # autograd's new tensors name the device that they pose on
                if each.dim() and self.storage(each).kind is Memory.HOST:
                    self.storage(each).kind = Memory.DEVICE
            self._launch(name, [each for each in reads if self.is_on_device(each)], writes)
            if hosted := [each for each in scalars if not self.is_on_device(each)]:
                self.access(self.host(), name, hosted, ())
            if name in _WAITING:
                self.host().join(self.current_stream().clock)

    def _launch(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        stream = self.current_stream()
        stream.join(self.host().clock)
        self.access(stream, name, reads, writes)

    def _copy(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, waits: bool) -> None:
        self._touch()
        self._launch(name if waits else f"{name}(non_blocking)", reads, writes)
        if waits:
            self.host().join(self.current_stream().clock)

    def _memmove(self, move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(target: int, source: int, num_bytes: int) -> Any:
            host = self.host()
            for address, is_write in ((source, False), (target, True)):
                for storage in list(self._storages.values()):
                    if 0 <= (start := address - storage.address) < storage.num_bytes:
                        end = start + num_bytes
                        access = Access("memmove", _place(), host, host.tick(), start, end, is_write)
                        self._add(storage, access)
            return move(target, source, num_bytes)

        return moved

    # What is replaced

    def _cuda(self) -> Iterator[Any]:
        fakes: dict[str, Any] = {
            "Stream": lambda *_, **__: self.new_stream(),
            "Event": lambda *_, **__: _Event(self),
            "ExternalStream": None,
            "stream": self.on,
            "current_stream": self.current_stream,
            "default_stream": lambda _=None: self._default,
            "synchronize": self._synchronize,
            "set_device": lambda _: None,
            "current_device": lambda: 0,
            "check_error": lambda _: None,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self._unregister
            ),
        }
        for name, fake in fakes.items():
            yield mock.patch.object(torch.cuda, name, fake)

    def _tensors(self) -> Iterator[Any]:
        """Let storages of the CPU pose as memory of the device, or as pinned memory."""
        device_of, numpy, tolist, clone = Tensor.device.__get__, Tensor.numpy, Tensor.tolist, Tensor.clone  # type: ignore[attr-defined]

        def poses(x: Tensor, kind: Memory) -> bool:
            return device_of(x).type == "cpu" and self.storage(x).kind is kind

        def read(function: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                assert not poses(x, Memory.DEVICE), f"{function.__name__} of a tensor on the device"
                with self._lock:
                    self.access(self.host(), function.__name__, [x], [])
                return function(x, *args, **kwargs)

            return recorded

        def pinned(x: Tensor) -> Tensor:
            with self.making(Memory.PINNED):
                return clone(x)

        fakes: dict[str, Any] = {
            "device": property(lambda x: DEVICE if poses(x, Memory.DEVICE) else device_of(x)),
            "is_cuda": property(lambda x: poses(x, Memory.DEVICE)),
            "is_cpu": property(lambda x: device_of(x).type == "cpu" and not poses(x, Memory.DEVICE)),
            "is_pinned": lambda x: poses(x, Memory.PINNED),
            "pin_memory": pinned,
            "numpy": read(numpy),
            "tolist": read(tolist),
            "to": self._moves(Tensor.to),
            "record_stream": lambda x, stream: self.storage(x).recorded.add(stream),
        }
        fakes["cpu"] = lambda x: fakes["to"](x, "cpu")
        fakes["cuda"] = lambda x, *_, **kwargs: fakes["to"](x, DEVICE, **kwargs)
        for name, fake in fakes.items():
            yield mock.patch.object(Tensor, name, fake)
        resize = self._resizes(torch.UntypedStorage.resize_)
        yield mock.patch.object(torch.UntypedStorage, "resize_", resize)
        for holder, name in (
            (holder, name) for holder, names in _FACTORIES.items() for name in names.split()
        ):
            yield mock.patch.object(holder, name, self._places(getattr(holder, name)))

    def _places(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a factory whose tensors pose on the device or in the pinned memory that is requested."""

        @wraps(factory)
        def placed(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            where = None if device is None else torch.device(device).type
            if where == "meta" or (where is None and not pin_memory):
                return factory(*args, **kwargs, **({} if device is None else {"device": device}))
            kind = Memory.DEVICE if where == "cuda" else Memory.PINNED if pin_memory else Memory.HOST
            with self.making(kind):
                out = factory(*args, device="cpu", **kwargs)
                self.storage(out, kind)
            return out

        return placed

    def _moves(self, to: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `Tensor.to`, which copies a tensor to where it should pose if it does not pose there."""

        def moved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args and isinstance(args[0], Tensor):
                args = (args[0].device, args[0].dtype, *args[1:])
            if args and isinstance(args[0], torch.device | str | int):
                device, *args = args  # type: ignore[assignment]
            else:
                device = kwargs.pop("device", None)
            given = {**dict(zip(("dtype", "non_blocking", "copy"), args, strict=False)), **kwargs}
            kwargs = {name: value for name, value in given.items() if value is not None}
            if device is None or torch.device(device).type == "meta" or x.is_meta:
                return to(x, **kwargs) if device is None else to(x, device=device, **kwargs)
            is_cuda = torch.device(device).type == "cuda"
            if is_cuda == self.is_on_device(x):
                return to(x, **kwargs) if kwargs else x
            with self.making(Memory.DEVICE if is_cuda else Memory.HOST):
                return to(x, **{"dtype": x.dtype, **kwargs, "copy": True})

        return moved

    def _synchronize(self, _: object = None) -> None:
        self._touch()
        for stream in self._streams:
            self.host().join(stream.clock)

    def _register(self, address: int, num_bytes: int, _: int) -> int:
        self._pinned[address] = num_bytes
        for storage in self._storages.values():
            if storage.address == address:
                storage.kind = Memory.PINNED
        return 0

    def _unregister(self, address: int) -> int:
        self._pinned.pop(address, None)
        for storage in list(self._storages.values()):
            if storage.address == address and self._is_open:
                for access in storage.unordered(self.host().clock):
                    if isinstance(access.timeline, _Stream):
                        self._fail(access, f"{storage} are unpinned at {_place()}, but may still be {access}")
        return 0

    def _collectives(self) -> Iterator[Any]:
        def reduced(group: Any, tensors: list[Tensor], *_: Any, **__: Any) -> _Work:
            return self._communicate(group, "all-reduce", tensors, tensors)

        def broadcast(group: Any, tensors: list[Tensor], *_: Any, **__: Any) -> _Work:
            return self._communicate(group, "broadcast", tensors, tensors)

        def gathered(group: Any, whole: Tensor, mine: Tensor, *_: Any, **__: Any) -> _Work:
            with _unrecorded():
                whole.view(group.size(), -1).copy_(mine.reshape(1, -1).clone())
            return self._communicate(group, "all-gather", [mine], [whole])

        def scattered(group: Any, mine: Tensor, whole: Tensor, *_: Any, **__: Any) -> _Work:
            with _unrecorded():
                mine.view(-1).copy_(whole.view(group.size(), -1)[group.rank()].clone())
            return self._communicate(group, "reduce-scatter", [whole], [mine])

        def exchanged(group: Any, received: Tensor, sent: Tensor, *_: Any, **__: Any) -> _Work:
            with _unrecorded():
                received.view(-1).copy_(sent.reshape(-1).clone())
            return self._communicate(group, "all-to-all", [sent], [received])

        def sent(group: Any, tensors: list[Tensor], *_: Any, **__: Any) -> _Work:
            return self._communicate(group, "send", tensors, [])

        def received(group: Any, tensors: list[Tensor], *_: Any, **__: Any) -> _Work:
            with _unrecorded():
                for tensor in tensors:
                    tensor.zero_()
            return self._communicate(group, "receive", [], tensors)

        def begin_batch(group: Any, *_: Any) -> None:
            self._batches[group] = []

        def end_batch(group: Any, *_: Any) -> _Work:
            batch = self._batches.pop(group)
            reads, writes = ([each for _, *both in batch for each in both[way]] for way in (0, 1))
            return self._communicate(
                group, "+".join(dict.fromkeys(what for what, *_ in batch)), reads, writes
            )

        fakes = {
            "allreduce": reduced,
            "broadcast": broadcast,
            "_allgather_base": gathered,
            "all_gather_single": gathered,  # its name since torch 2.13
            "alltoall_base": exchanged,
            "all_to_all_single": exchanged,  # its name since torch 2.13
            "_reduce_scatter_base": scattered,
            "reduce_scatter_single": scattered,
            "send": sent,
            "recv": received,
            "_start_coalescing": begin_batch,
            "_end_coalescing": end_batch,
        }
        for name, fake in fakes.items():
            if hasattr(dist.ProcessGroup, name):
                yield mock.patch.object(dist.ProcessGroup, name, fake)

    def _communicate(
        self, group: dist.ProcessGroup, what: str, reads: list[Tensor], writes: list[Tensor]
    ) -> _Work:
        """Queue a collective on the group's stream, as NCCL does; on the host it is complete at once."""
        if group in self._batches:
            self._batches[group].append((what, reads, writes))
            return _Work(self, {}, [])
        self._touch()
        if not all(map(self.is_on_device, (*reads, *writes))):
            self.access(self.host(), what, reads, writes)
            return _Work(self, {}, [])
        if group not in self._group_streams:
            self._group_streams[group] = self.new_stream(f"the communication stream of {group.group_desc}")
        stream = self._group_streams[group]
        stream.join(self.marked(self.current_stream()))
        self.access(stream, what, reads, writes)
        work = _Work(self, dict(stream.clock), [*reads, *writes])
        self._in_flight.add(work)
        return work

    def arrived(self, work: _Work) -> None:
        """Let the current stream wait for a collective, which drops its tensors."""
        self.wait(self.current_stream(), work.clock)
        self._in_flight.discard(work)
        work.tensors = []

    def _threads(self) -> Iterator[Any]:
        checker, local = self, self._local
        start, join = threading.Thread.start, threading.Thread.join
        submit, result = ThreadPoolExecutor.submit, Future.result
        set_event, wait_for = threading.Event.set, threading.Event.wait
        clocks: weakref.WeakKeyDictionary[Any, dict[Timeline, int]] = weakref.WeakKeyDictionary()

        def started(thread: threading.Thread) -> None:
            run, clock, ended = thread.run, dict(checker.host().clock), Timeline("")

            def recorded() -> None:
                with checker._modes():
                    checker.host().join(clock)
                    try:
                        run()
                    finally:
                        ended.join(checker.host().clock)

            thread.run = recorded  # type: ignore[method-assign]
            clocks[thread] = ended.clock
            start(thread)

        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if not thread.is_alive():
                checker.host().join(clocks.get(thread, {}))

        def submitted(
            pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            clock, ended = dict(checker.host().clock), Timeline("")

            def run() -> Any:
                checker.host().join(clock)
                try:
                    return work(*args, **kwargs)
                finally:
                    ended.join(checker.host().clock)

            future = submit(pool, run)
            clocks[future] = ended.clock
            return future

        def read(future: Future[Any], timeout: float | None = None) -> Any:
            try:
                return result(future, timeout)
            finally:
                checker.host().join(clocks.get(future, {}))

        def set_(event: threading.Event) -> None:
            if hasattr(local, "host"):  # not while a thread starts
                clocks[event] = dict(checker.host().clock)
            set_event(event)

        def wait(event: threading.Event, timeout: float | None = None) -> bool:
            is_set = wait_for(event, timeout)
            if is_set:
                checker.host().join(clocks.get(event, {}))
            return is_set

        yield mock.patch.object(threading.Thread, "start", started)
        yield mock.patch.object(threading.Thread, "join", joined)
        yield mock.patch.object(ThreadPoolExecutor, "submit", submitted)
        yield mock.patch.object(Future, "result", read)
        yield mock.patch.object(threading.Event, "set", set_)
        yield mock.patch.object(threading.Event, "wait", wait)


class _Stream(Timeline):
    """Stands for a ``torch.cuda.Stream``."""

    def __init__(self, checker: StreamChecker, name: str) -> None:
        super().__init__(name)
        self._checker = checker
        self.device = DEVICE

    def wait_stream(self, other: Timeline) -> None:
        self._checker.wait(self, self._checker.marked(other))

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self._checker)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._checker.wait(self._checker.host(), self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True


class _Event:
    """Stands for a ``torch.cuda.Event``."""

    def __init__(self, checker: StreamChecker) -> None:
        self._checker = checker
        self._clock: dict[Timeline, int] = {}  # not recorded: nothing waits for it

    def record(self, stream: Timeline | None = None) -> None:
        self._checker._touch()
        self._clock = self._checker.marked(stream or self._checker.current_stream())

    def wait(self, stream: Timeline | None = None) -> None:
        self._checker.wait(stream or self._checker.current_stream(), self._clock)

    def synchronize(self) -> None:
        self._checker.wait(self._checker.host(), self._clock)

    def query(self) -> bool:
        """Return True, as late as it can be called."""
        self.synchronize()
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


class _Work:
    """Stands for a ``dist.Work`` of NCCL; it refers to the tensors until `wait`."""

    def __init__(self, checker: StreamChecker, clock: dict[Timeline, int], tensors: list[Tensor]) -> None:
        self._checker = checker
        self.clock = clock
        self.tensors = tensors

    def wait(self, *_: object) -> bool:
        self._checker.arrived(self)
        return True


class _Recorder(TorchDispatchMode):
    """Records every operator of a thread."""

    def __init__(self, checker: StreamChecker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._checker._is_open:
            with self._checker._lock:
                self._checker.check_memory(func, (args, kwargs))
        out = func(*args, **(kwargs or {}))
        if self._checker._is_open:
            with self._checker._lock:
                self._checker.ran(func, args, kwargs or {}, out)
        return out


_FACTORIES = {
    torch: """
        empty empty_like empty_strided zeros zeros_like ones ones_like full full_like rand rand_like randn
        randn_like randint randperm arange linspace eye tensor as_tensor scalar_tensor""",
    Tensor: "new_empty new_zeros new_ones new_full new_tensor",
}
"""Functions with the arguments ``device`` and ``pin_memory``."""
_WITHOUT_ACCESS = ("detach", "empty", "new_", "set_", "_unsafe_view")
"""Beginnings of the names of operators that access no elements of their arguments, besides views."""
_WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
"""Operators whose result the host waits for."""


@contextmanager
def _unrecorded() -> Iterator[None]:
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and those that it writes, by its schema."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        (writes if is_written else reads).extend(tensors)
    return reads, writes


def _only_views(
    func: Any, name: str, writes: Sequence[Tensor], fresh: Sequence[Tensor], outputs: Sequence[Tensor]
) -> bool:
    """Return whether an operator touches no element: it returns views, or changes what a tensor refers to."""
    return name == "set_" or bool(outputs and not writes and not fresh)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _place() -> str:
    """Return the innermost line of the project that is running, or the innermost line at all."""
    frame, found = sys._getframe(1), "the end of a thread"
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "/.venv/" not in file and file != __file__:
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        if not file.startswith(_LIBRARIES):
            found = f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found
