"""Activation offload: keep saved tensors of some layers in host memory between forward and backward.

`apply_offload` wraps `run_layers` of a built stage, after `apply_recompute` and before `compile_layers`.

    when                        what
    a tensor is saved           a copy of its storage to the host starts
    the next group has run      the storage is released: later work waits for the copy
    backward of a group begins  copies back start, for this group (unless it is still there) and the next one
    a saved tensor is used      the device waits for the copies of its group

A group is a layer, or several layers that are recomputed together and save their input. A device holds the
offloaded tensors of at most two groups: the running group, and the one before or after it.

A storage is copied once, however many of its tensors are saved. Storages that stay on the device anyway are
not copied: parameters, tables, and inputs that all layers share. With stored weight gradients
(zero bubble), the inputs of linear layers stay on the device from the backward of a layer's input to the
backward of its weights: copying them again would take longer than this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalite.data.microbatch import LayerState
from megalite.model.stage import Stage
from megalite.utils.errors import UserError, first_line
from megalite.utils.hardware.host_memory import HostBuffer, HostBuffers, HostMemoryError
from megalite.utils.torch_private import storage_number, tree_leaves
from megalite.utils.wrapping import wrap

MIN_BYTES = 1 << 14
"""Smallest storage to copy, in bytes: starting a copy takes as long as copying this many bytes."""


class ActivationOffload:
    """Moves saved tensors of a rank's stages to the host and back.

    Args:
        device: device of the stages.

    Attributes:
        buffers: copies in host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffers = HostBuffers(device)
        self.device = device
        self._leaving: _SavedGroup | None = None  # the latest group; its storages are still on the device

    def ran(self, group: _SavedGroup | None) -> None:
        """Release the storages of the previous group; `group` has just run, None if it is not offloaded."""
        self._release()
        self._leaving = group
        if group is not None:
            group.copied = self.buffers.mark_copied()

    def begin_backward(self, group: _SavedGroup | None, before: _SavedGroup | None, grad: Tensor) -> None:
        """Start to copy back a group, and the group before it, whose backward is next."""
        if group is self._leaving:
            self._leaving = None
        self._release()
        for each in (group, before):
            if each is not None:
                each.fetch()

    def _release(self) -> None:
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None


class _Piece:
    """Saved storage: on the device, on the host, or on both while it is copied."""

    def __init__(self, storage: torch.UntypedStorage, offload: ActivationOffload) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=offload.device)
        self.on_device: Tensor | None = whole.set_(storage, 0, (storage.nbytes(),), (1,))
        self._buffers = offload.buffers
        self._on_host: HostBuffer | None = None
        self._on_host = self._buffers.copy_to_host(self.on_device)

    def fetch(self) -> None:
        """Start to copy the storage back, unless it is on the device."""
        if self.on_device is None:
            assert self._on_host is not None
            self.on_device, self._on_host = self._buffers.copy_to_device(self._on_host), None

    def __del__(self) -> None:
        if self._on_host is not None:
            if self.on_device is not None:
                self._buffers.keep_for_copies(self.on_device)
            self._buffers.give_back(self._on_host)


class _Saved(NamedTuple):
    """Represents a saved tensor in autograd's graph."""

    piece: _Piece
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedGroup:
    """Saved tensors of one group of layers for one microbatch.

    Args:
        layers: layers of the group.
        kept: storages that stay on the device, besides the layers' parameters.
        before: previous group, which may have saved the same storages.

    Attributes:
        pieces: saved storages by storage number, until they are released.
        copied: event at the end of their copies to the host.
    """

    def __init__(
        self,
        offload: ActivationOffload,
        layers: Sequence[nn.Module],
        kept: set[int],
        before: _SavedGroup | None,
    ) -> None:
        self.pieces: dict[int, _Piece] = {}
        self.copied: torch.cuda.Event | None = None
        self._offload = offload
        self._layers: Sequence[nn.Module] | None = layers
        self._kept = kept
        self._before = {} if before is None else before.pieces
        self._released: list[weakref.ref[_Piece]] = []
        self._arrived: torch.cuda.Event | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which the group runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def release(self) -> None:
        """Release the storages on the device; the device's later work waits for their copies."""
        self._offload.buffers.wait(self.copied)
        for piece in self.pieces.values():
            piece.on_device = None
        self._forget()

    def fetch(self) -> None:
        """Start to copy back the storages that backward still needs."""
        self._forget()
        pieces = [piece for each in self._released if (piece := each()) is not None]
        if any(piece.on_device is None for piece in pieces):
            for piece in pieces:
                piece.fetch()
            self._arrived = self._offload.buffers.mark_arrived()

    def _forget(self) -> None:
        """Drop the pieces: autograd's graph frees each piece after its use."""
        self._released += map(weakref.ref, self.pieces.values())
        self.pieces, self._before = {}, {}

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        storage = tensor.untyped_storage()
        if not tensor.is_floating_point() or storage.nbytes() < MIN_BYTES:
            return tensor.detach()
        if self._layers is not None:  # first saved tensor: ZeRO stage 3 has gathered the parameters by now
            parameters = (parameter for layer in self._layers for parameter in layer.parameters())
            self._kept, self._layers = self._kept | _storages(parameters), None
        number = storage_number(storage)
        if number in self._kept:
            return tensor.detach()
        piece = self.pieces.get(number) or self._before.get(number)
        if piece is None or piece.on_device is None:  # another storage with this number was released
            piece = self._copied(storage)
        self.pieces[number] = piece
        return _Saved(piece, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _copied(self, storage: torch.UntypedStorage) -> _Piece:
        try:
            return _Piece(storage, self._offload)
        except HostMemoryError as error:
            held = self._offload.buffers.num_bytes
            mistake = UserError(
                f"--cpu-offload-activations: {storage.nbytes():,} bytes of host memory cannot be allocated "
                f"and pinned besides {held:,} bytes ({first_line(error)}): pass a smaller "
                "--cpu-offload-activations"
            )
            mistake.on_one_rank = True  # other ranks may have succeeded
            raise mistake from None

    def _unpack(self, saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.piece.on_device is None:  # backward has not begun at the group's output
            self.fetch()
        if self._arrived is not None:
            self._offload.buffers.wait(self._arrived)
            self._arrived = None
        whole = saved.piece.on_device
        assert whole is not None
        tensor = torch.empty(0, dtype=saved.dtype, device=whole.device)
        return tensor.set_(whole.untyped_storage(), saved.offset, saved.size, saved.stride)


def _storages(tensors: Iterable[Any]) -> set[int]:
    """Return the numbers of the tensors' storages; each is valid as long as its storage exists."""
    return {storage_number(each.untyped_storage()) for each in tensors if isinstance(each, Tensor)}


def apply_offload(stage: Stage, num_layers: int, offload: ActivationOffload) -> None:
    """Offload the saved tensors of a stage's first layers; call it after `apply_recompute`.

    Args:
        num_layers: a group is offloaded if its first layer is among this many layers.
    """
    stage.prepare_tables(stage.config.seq_length)

    def run_offloaded(
        run_layers: Callable[..., LayerState], layers: Sequence[nn.Module], state: LayerState, *inputs: Any
    ) -> LayerState:
        if not torch.is_grad_enabled():
            return run_layers(layers, state, *inputs)
        kept = _storages([*tree_leaves(inputs), *state.embeddings.values(), *stage.tables()])
        before: _SavedGroup | None = None
        for group in stage.groups_of(len(layers)):
            run = partial(stage.run_group, group, layers)
            saved = None
            if group.start < num_layers:
                saved = _SavedGroup(offload, [layers[i] for i in group], kept, before)
                with saved.hooks():
                    state = run(state, *inputs)
            else:
                state = run(state, *inputs)
            offload.ran(saved)
            if state.hidden.requires_grad:
                state.hidden.register_hook(partial(offload.begin_backward, saved, before))
            before = saved
        return state

    wrap(stage, "run_layers", lambda run_layers: partial(run_offloaded, run_layers))
