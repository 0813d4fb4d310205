"""Folders that torch.distributed.checkpoint writes, as sources of a conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.convert.foreign_files import SHARDS, ShardedTensors
from megalite.config import ParallelConfig
from megalite.utils.errors import UserError
from tests.checkpoint_folder import write_dcp
from tests.live_ranks import run_ranks
from tests.unit.checkpoint.convert.foreign_models import build, same_bits, save, tensors_of


def written(tmp_path: Path, *, as_shards: bool) -> tuple[Path, Path]:
    """Return a Hugging Face folder, and the folder that DCP wrote of it, with the config."""
    theirs, folder = save(build("llama"), tmp_path / "hf"), tmp_path / "dcp"
    folder.mkdir()
    ranks = ParallelConfig(data_parallel_size=3).mesh
    assert run_ranks(write_dcp, ranks, 3, tensors_of(theirs), folder, as_shards) == [True] * 3
    return theirs, folder


def test_shards_are_the_same_model(tmp_path: Path) -> None:
    theirs, folder = written(tmp_path, as_shards=True)
    assert len(list(folder.glob(SHARDS))) == 3
    with pytest.raises(UserError, match=r"has weights but no config.json: copy the model's config.json"):
        Conversion(folder, tmp_path / "ours").run()
    shutil.copy(theirs / "config.json", folder)
    Conversion(folder, tmp_path / "ours").run()  # it compares transformers' model, with the tensors it reads
    Conversion(tmp_path / "ours", tmp_path / "back").run()
    expected, found = tensors_of(theirs), tensors_of(tmp_path / "back")
    assert expected.keys() == found.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())


def test_a_pickled_index_is_refused(tmp_path: Path) -> None:
    _, folder = written(tmp_path, as_shards=False)
    assert (folder / ".metadata").is_file()
    (tmp_path / "run").mkdir()
    folder.rename(tmp_path / "run" / "step-10")  # as torchtitan names it
    for given in (tmp_path / "run", tmp_path / "run" / "step-10"):
        with pytest.raises(UserError, match=r"torch.distributed.checkpoint \(torchtitan.*convert_to_hf.py"):
            Conversion(given, tmp_path / "ours").run()
    (tmp_path / "run" / "step-10" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(UserError, match=r"has Megatron's distributed format, .* --ckpt-format torch "):
        Conversion(tmp_path / "run" / "step-10", tmp_path / "ours").run()


def shard(folder: Path, number: int, tensor: torch.Tensor, offsets: object) -> None:
    info = json.dumps({"a": {"saved_offsets": offsets}})
    file = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
    save_file({"a": tensor}, file, {"DCP_SHARDING_INFO": info})


def test_pieces_in_both_dims_are_put_together(tmp_path: Path) -> None:
    full = torch.arange(30).view(5, 6)
    shard(tmp_path, 1, full[:3, :4].contiguous(), [0, 0])
    shard(tmp_path, 2, full[3:, :4].contiguous(), [3, 0])
    shard(tmp_path, 3, full[:, 4:].contiguous(), [0, 4])
    shard(tmp_path, 4, full[5:, 4:].contiguous(), [5, 4])  # nothing
    assert torch.equal(ShardedTensors(tmp_path)["a"], full)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_missing_shard_is_noticed(tmp_path: Path, lost: int) -> None:
    full = torch.arange(30).view(5, 6)
    for number, (row, column) in enumerate([(0, 0), (0, 3), (3, 0), (3, 3)]):
        if number != lost:
            part = full[row : row + 3, column : column + 3].contiguous()
            shard(tmp_path, number, part, [row, column])
    with pytest.raises(UserError, match=r"does not hold all parts of a, each once: is a shard missing\?$"):
        ShardedTensors(tmp_path)


def test_pieces_twice_are_refused(tmp_path: Path) -> None:
    """As many elements as the tensor has, but one piece twice and a hole."""
    for number, row in enumerate((0, 0, 2)):
        shard(tmp_path, number, torch.zeros(1, 2), [row, 0])
    with pytest.raises(UserError, match="each once"):
        ShardedTensors(tmp_path)


@pytest.mark.parametrize("offsets", [[0], [-1, 0], [0.5, 0], ["0", 0], 7, None, [2**64, 0]])
def test_damaged_offsets_are_refused(tmp_path: Path, offsets: object) -> None:
    shard(tmp_path, 1, torch.zeros(2, 2), offsets)
    with pytest.raises(UserError, match=r"00001.safetensors is damaged: "):
        ShardedTensors(tmp_path)


def test_a_file_without_offsets_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, 1, torch.zeros(2, 2), [0, 0])
    (file,) = tmp_path.glob(SHARDS)
    save_file(load_file(file), file)
    with pytest.raises(UserError, match=r"is damaged: it has no DCP_SHARDING_INFO"):
        ShardedTensors(tmp_path)
