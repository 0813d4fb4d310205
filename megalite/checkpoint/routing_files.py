"""Write the experts of each token to files, and read them in any layout.

A folder has a folder for each recorded iteration, with a safetensors file of each rank that routed tokens:

    iteration_0000005_samples_32_to_39/rank_0_of_4.safetensors

A file holds the numbers of its samples in the run, ``samples [n]``, the positions of its tokens in each,
``positions [n, s]``, and the experts of the tokens by name of the router, ``layers.1.mlp.router [n, s, k]``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor

from megalite.checkpoint.tensor_files import FilePiece, write_file
from megalite.utils.errors import UserError

_SAMPLES, _POSITIONS = "samples", "positions"
_FOLDER = re.compile(r"iteration_\d+_samples_(\d+)_to_(\d+)")


@dataclass(frozen=True)
class IterationFolder:
    """Folder of an iteration.

    Attributes:
        samples: numbers of its samples in the run.
    """

    path: Path
    samples: range

    @staticmethod
    def of(folder: Path, iteration: int, samples: range) -> IterationFolder:
        """Return the folder of an iteration in the folder of a run."""
        return IterationFolder(
            folder / f"iteration_{iteration:07}_samples_{samples[0]}_to_{samples[-1]}", samples
        )

    def has_some_of(self, samples: range) -> bool:
        """Return whether the iteration has any of these samples."""
        return self.samples.start < samples.stop and samples.start < self.samples.stop

    def clear(self) -> None:
        """Make an empty folder: an earlier run may have recorded the iteration in another layout."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def write(self, index: int, num_files: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one of the iteration's files, under its name once it is complete.

        Raises:
            OSError: it cannot be written.
        """
        file = self.path / f"rank_{index}_of_{num_files}.safetensors"
        partial = file.with_suffix(".partial")
        write_file(partial, {name: FilePiece(each) for name, each in tensors.items()})
        partial.rename(file)


def recorded_iterations(folder: Path) -> list[IterationFolder]:
    """Return the iterations that a folder has, in the order of their samples.

    Raises:
        UserError: it has none.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FOLDER.fullmatch(path.name):
            found.append(IterationFolder(path, range(int(match[1]), int(match[2]) + 1)))
    if not found:
        raise UserError(
            f"--replay-routing-from {folder} has no recorded iteration: pass a folder that a run has written "
            "with --record-routing"
        )
    return sorted(found, key=lambda each: each.samples.start)


def tensors_of_file(samples: Tensor, positions: Tensor, experts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a rank's file."""
    return {_SAMPLES: samples, _POSITIONS: positions, **experts}


class _Piece(NamedTuple):
    """Some tokens of a sample: a row of a file, and their positions."""

    file: Any
    row: int
    positions: Tensor


class RecordedExperts:
    """Experts of tokens of some iterations; files are mapped into memory and read on access.

    Args:
        folders: the iterations.
        seq_length: number of tokens of a sample.
        num_experts: number of experts of a layer.

    Raises:
        UserError: files are missing, or cannot be read.
    """

    def __init__(self, folders: Sequence[IterationFolder], seq_length: int, num_experts: int) -> None:
        self.seq_length, self.num_experts = seq_length, num_experts
        self._folders = ", ".join(each.path.name for each in folders)
        self._pieces: dict[int, list[_Piece]] = {}
        for folder in folders:
            for path in _complete_files(folder.path):
                file, samples, positions = _opened(path)
                for row, sample in enumerate(samples.tolist()):
                    self._pieces.setdefault(sample, []).append(_Piece(file, row, positions[row]))

    def missing(self, samples: range) -> list[int]:
        """Return the samples that no file has."""
        return [each for each in samples if each not in self._pieces]

    def of_sample(self, layer: str, sample: int, topk: int) -> Tensor:
        """Return the experts of a whole sample, int64 ``[S, k]``.

        Args:
            layer: name of the router in the model.

        Raises:
            UserError: the files lack the layer or some tokens, or are of another model.
        """
        experts = torch.full((self.seq_length, topk), -1)
        for file, row, positions in self._pieces.get(sample, ()):
            if layer not in file.keys():  # noqa: SIM118  a file of another pipeline stage; it is no dict
                continue
            piece_experts = file.get_slice(layer)[row]  # [s, k]
            is_alike = piece_experts.shape[-1] == topk and int(positions.max()) < self.seq_length
            if not is_alike or int(piece_experts.max()) >= self.num_experts:
                raise UserError(
                    f"{self._folders} is of another model: {layer} has {topk} of {self.num_experts} experts "
                    f"for each of {self.seq_length} tokens here"
                )
            experts[positions] = piece_experts.long()
        if int(experts.min()) < 0:
            raise UserError(f"{self._folders} lacks experts of {layer} for tokens of sample {sample}")
        return experts


def _opened(path: Path) -> tuple[Any, Tensor, Tensor]:
    """Open a file, and read its samples and positions.

    Raises:
        UserError: it cannot be read.
    """
    try:
        file = safetensors.safe_open(path, framework="pt", device="cpu")
        samples = file.get_tensor(_SAMPLES)
        # In older files all samples have the same positions, [s].
        return file, samples, file.get_tensor(_POSITIONS).expand(len(samples), -1)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): record the iteration again") from None


def _complete_files(folder: Path) -> list[Path]:
    """Return the files of an iteration.

    Raises:
        UserError: some of them are missing.
    """
    files = sorted(folder.glob("rank_*.safetensors"))
    expected = {int(file.stem.rsplit("_", 1)[1]) for file in files}
    if expected != {len(files)}:
        raise UserError(f"{folder} is incomplete, with {len(files)} files: record the iteration again")
    return files
