"""A rank's tensors out of a checkpoint's files, whatever layout wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import safetensors
import torch
from torch import Tensor

from megalite.checkpoint.manifest import Manifest, TensorRecord, dtype_name, dtype_of
from megalite.checkpoint.place import Place, Tensors, are_disjoint
from megalite.optim.part import Part
from megalite.topology import Topology


def read_tensors(
    manifest: Manifest, tensors: Tensors, topology: Topology, sources: Mapping[str, str] | None = None
) -> None:
    """Copies this rank's elements out of the files, in place; opens those alone that have some of them.

    Files are mapped into memory one at a time: of a tensor, only what is copied is read. Padding that no
    file has stays as it is. Floating-point numbers of another type are rounded to the tensor's.

    Args:
        tensors: of this rank, by name.
        sources: the checkpoint's names of tensors that have others there.

    Raises:
        ValueError: a file cannot be read, a tensor has another shape or type, or elements of it are in no
            file.
    """
    read_targets(
        manifest,
        [
            Target(
                (sources or {}).get(name, name),
                tensor.tensor if isinstance(tensor, Part) else tensor.view(-1),
                Place.of(tensor, topology),
            )
            for name, tensor in tensors.items()
        ],
    )


class Target:
    """Elements of a tensor in this process that are read, piece by piece.

    Args:
        elements: flat, as many as the place has.
    """

    def __init__(self, name: str, elements: Tensor, place: Place) -> None:
        self.name, self.elements, self.place = name, elements, place

    def pieces(self, records: Sequence[TensorRecord]) -> list[TensorRecord]:
        """Those of the tensor's pieces that have elements of the target; of copies the first.

        Raises:
            ValueError: they are of another tensor, or elements are in none of them or in several.
        """
        distinct: dict[Place | None, TensorRecord] = {}
        for record in records:
            distinct.setdefault(record.place, record)
        if list(distinct) == [None]:
            return list(distinct.values())
        places = [self._comparable(record) for record in distinct.values()]
        if not are_disjoint(places):
            raise ValueError(f"elements of {self.name} are in several files")
        if missing := self.place.num_used - sum(self.place.num_common(place) for place in places):
            raise ValueError(f"{missing} elements of {self.name} are in no file")
        return [
            record
            for place, record in zip(places, distinct.values(), strict=True)
            if self.place.num_common(place, with_padding=True)
        ]

    @torch.no_grad()
    def take(self, saved: Tensor, record: TensorRecord) -> None:
        """Copies what the two have in common; to 16 bits by way of fp32, as main weights are rounded.

        Raises:
            ValueError: the piece is not what its record told, or of another tensor.
        """
        shape = tuple(saved.shape)
        place = record.place or Place(shape, 0, 0, shape, 0, saved.numel())
        if dtype_name(saved.dtype) != record.dtype:
            raise ValueError(f"{self.name} is {dtype_name(saved.dtype)}, the index says {record.dtype}")
        self._check(record.dtype, place)
        if place.end - place.start != saved.numel():
            raise ValueError(f"{self.name} has {saved.numel()} elements, its place {place.end - place.start}")
        is_rounded = self.elements.dtype in (torch.bfloat16, torch.float16)
        for source in place.patches(saved.reshape(-1)):
            for target in self.place.patches(self.elements):
                common, values = target.overlap(source), source.overlap(target).values
                if is_rounded and saved.dtype == torch.float64:
                    values = values.float()
                common.values.copy_(values)

    def _comparable(self, record: TensorRecord) -> Place:
        if record.place is None:
            raise ValueError(f"{record.file}: {self.name} is whole here and in pieces elsewhere")
        try:
            self._check(record.dtype, record.place)
        except ValueError as error:
            raise ValueError(f"{record.file}: {error}") from None
        return record.place

    def _check(self, dtype: str, place: Place) -> None:
        here, mine = self.place, self.elements.dtype
        is_alike = dtype == dtype_name(mine) or (mine.is_floating_point and dtype_of(dtype).is_floating_point)
        if not is_alike or (place.full_shape, place.dim) != (here.full_shape, here.dim):
            raise ValueError(
                f"{self.name} is {dtype} {place.full_shape} cut along dim {place.dim}, "
                f"here {dtype_name(mine)} {here.full_shape} along {here.dim}"
            )


def read_targets(manifest: Manifest, targets: Iterable[Target]) -> None:
    """Fills the targets; raises what `read_tensors` does."""
    wanted: dict[str, list[tuple[Target, TensorRecord]]] = {}
    for target in targets:
        for record in target.pieces(manifest.tensors.get(target.name, ())):
            wanted.setdefault(record.file, []).append((target, record))
    for file in sorted(wanted):
        with open_tensors(manifest, file) as handle:
            for target, record in wanted[file]:
                target.take(handle.get_tensor(target.name), record)


@contextmanager
def open_tensors(manifest: Manifest, file: str) -> Iterator[Any]:
    """A handle of safetensors, mapped into memory; tensors are read when they are asked for.

    Raises:
        ValueError: it cannot be opened, or what the block read of it was not as told; with the file's name.
    """
    path = manifest.folder / file
    try:
        if path.is_symlink():
            raise ValueError("it is a link")
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # the library would wait for a pipe's other end
        with safetensors.safe_open(path, framework="pt", device="cpu") as handle:
            yield handle
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file}: {error}") from error
