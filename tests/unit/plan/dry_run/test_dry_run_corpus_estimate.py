"""Sizes of a dry run's corpora are those that a run builds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.data.blend import BlendedDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedWriter
from megalite.distributed.topology import Topology
from megalite.plan.dry_run.dry_run import corpora_of
from megalite.train.run_context import build_data, resolve_run

S = 16


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Three corpora of some thousand tokens."""
    found = []
    for i, number in enumerate((90, 40, 60)):
        prefix = str(tmp_path / f"corpus{i}")
        lengths = np.random.default_rng(i).integers(5, 60, number).astype(np.int32)
        with IndexedWriter(prefix, "uint16") as writer:
            writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
        found.append(prefix)
    return found


def config_of(iterations: int, **data: object) -> Config:
    return Config(
        model=ModelConfig(seq_length=S, vocab_size=100),
        data=DataConfig(tokenizer_type="NullTokenizer", **data),
        training=TrainingConfig(train_iters=iterations, global_batch_size=4, eval_interval=5, eval_iters=1),
    )


def bytes_of(dataset: object) -> int:
    """Size of the indices of a built dataset."""
    if isinstance(dataset, BlendedDataset):
        own = dataset.dataset_index.nbytes + dataset.dataset_sample_index.nbytes
        return own + sum(map(bytes_of, dataset.datasets))
    assert isinstance(dataset, GPTDataset)
    index = dataset.index
    return index.document_index.nbytes + index.sample_index.nbytes + index.shuffle_index.nbytes


@pytest.mark.parametrize("iterations", [3, 40, 900])
@pytest.mark.parametrize("weighted", ["one", "weights", "by tokens", "by documents"])
def test_index_sizes_are_those_of_the_built_indices(
    prefixes: list[str], weighted: str, iterations: int
) -> None:
    words = {
        "one": prefixes[:1],
        "weights": ["0.5", prefixes[0], "0.3", prefixes[1], "0.2", prefixes[2]],
    }.get(weighted, prefixes)
    blend_by = "documents" if weighted == "by documents" else "tokens"
    config = config_of(iterations, data_path=tuple(words), split="80,10,10", blend_by=blend_by)
    estimate = corpora_of(config, dp=1)
    with Topology.fake(ParallelConfig().mesh, 1, 0, device="cpu") as topology:
        built = build_data(resolve_run(config, topology))
    assert estimate.index_bytes == sum(map(bytes_of, (built.train, built.valid, built.test)))
    assert not estimate.skipped
    taken = sum(part.coverage.num_samples for part in estimate.parts if part.split == "train")
    assert taken == pytest.approx(4 * iterations)


def test_the_idx_alone_is_read_and_what_is_missing_is_named(prefixes: list[str]) -> None:
    Path(f"{prefixes[0]}.bin").unlink()
    config = config_of(3, train_data_path=(prefixes[0],), valid_data_path=("nowhere/corpus",))
    estimate = corpora_of(config, dp=1)
    (part,) = estimate.parts
    assert (part.split, part.coverage.prefix) == ("train", prefixes[0])
    assert estimate.skipped == ("nowhere/corpus.idx is not on this machine",)
