"""Which weights of a checkpoint the tools load, the model's or their average, and in which layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import read_manifest
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.data.tokenizers.tokenizer import ByteTokenizer
from megalite.distributed.topology import Topology
from megalite.generate.evaluate_text import WindowOptions
from megalite.generate.trained_model import (
    ModelFlags,
    _check_layout,
    load_model,
    open_trained,
    start_ranks,
    stop_token,
)
from megalite.train.trainer import start_trainer
from megalite.utils.errors import UserError


def _saved(topology: Topology, folder: Path, ema_decay: float | None) -> dict[str, Tensor]:
    """Train and save two iterations; return the checkpoint's tensors by name."""
    config = Config(
        model=replace(PRESETS["llama-tiny"], num_layers=1, vocab_size=128, params_dtype="bf16"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(global_batch_size=2, train_iters=2, eval_iters=0),
        optimizer=OptimizerConfig(ema_decay=ema_decay, lr=1e-2),
        checkpoint=CheckpointConfig(save=str(folder)),
    )
    folder.mkdir()
    with start_trainer(config, topology) as trainer:
        for _ in range(2):
            trainer.step()
        trainer.save(is_last=True)
    reader = FullReader(read_manifest(folder / "iter_0000002"))
    return {name: reader.tensor(name) for name in reader.names()}


@pytest.mark.parametrize(("ema", "prefix"), [(False, "model."), (True, "ema.")])
def test_the_weights_or_their_average_are_loaded(
    ema: bool, prefix: str, one_rank: Topology, tmp_path: Path
) -> None:
    tensors = _saved(one_rank, tmp_path / "run", 0.5)
    flags = ModelFlags(tmp_path / "run", None, "fp32", ParallelConfig(), None, ema)
    stage = load_model(open_trained(flags, one_rank), one_rank)
    for name, parameter in stage.named_parameters():
        assert parameter.equal(tensors[f"{prefix}{name}"].float()), name
    Conversion(tmp_path / "run", tmp_path / "new", target="megalite", ema=ema).run()
    reader = FullReader(read_manifest(tmp_path / "new" / "iter_0000002"))
    for name, _ in stage.named_parameters():
        assert reader.tensor(f"model.{name}").equal(tensors[f"{prefix}{name}"].to(torch.bfloat16)), name


def test_a_checkpoint_without_an_average_is_one_line(one_rank: Topology, tmp_path: Path) -> None:
    _saved(one_rank, tmp_path / "run", None)
    message = r"--ema: .*iter_0000002 holds no average of the weights, because its run had no --ema-decay"
    with pytest.raises(UserError, match=message):
        open_trained(ModelFlags(tmp_path / "run", None, None, ParallelConfig(), None, True), one_rank)
    with pytest.raises(UserError, match=message):
        Conversion(tmp_path / "run", tmp_path / "new", ema=True).run()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="--ema: only checkpoints of megalite hold an average"):
        Conversion(tmp_path / "hf", tmp_path / "new", ema=True).run()


def test_context_parallel_ranks_that_do_not_fit_are_one_line(
    one_rank: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = ParallelConfig(context_parallel_size=2, cp_comm_type="p2p")
    flags = ModelFlags(tmp_path, None, None, parallel, None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    message = r"--cp 2 does not divide the number of ranks, 1: start 2 \(torchrun --nproc-per-node 2\)"
    with pytest.raises(UserError, match=message), start_ranks(flags, {}):
        pass
    recurrent = {"recurrent_mixer": "gated_delta_net", "linear_num_key_heads": 3, "linear_num_value_heads": 3}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    odd = replace(PRESETS["llama-tiny"], vocab_size=128, seq_length=7)  # of samples, not of prompts
    _check_layout(odd, flags, world_size=2)
    with pytest.raises(UserError, match="--linear-num-key-heads 3 with --cp 2"):
        _check_layout(replace(odd, **recurrent, **heads), flags, world_size=2)


def test_a_window_that_ranks_cannot_cut_is_one_line() -> None:
    mesh = ParallelConfig(context_parallel_size=2, cp_comm_type="p2p").mesh
    message = r"--cp 2 cuts a window into 4 slices.*--seq-length 18 .*length 20, or"
    with Topology.fake(mesh, 2, 0) as topology, pytest.raises(UserError, match=message):
        WindowOptions(18, 18, 1).check(Config(), topology)


def test_a_vocabulary_without_an_end_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Endless(ByteTokenizer):
        @property
        def eod(self) -> int:
            raise UserError("the vocabulary has no end")

    assert stop_token(ByteTokenizer()) == 256
    assert caplog.messages == []
    assert stop_token(Endless()) is None
    (line,) = caplog.messages
    assert "no text will end before its maximum length" in line
