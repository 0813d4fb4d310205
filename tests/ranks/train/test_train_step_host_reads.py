"""Test what the host reads from the device in an iteration: the host waits, and the device idles after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.observe.recorder import Reader
from megalite.observe.verify.layouts import Layout
from megalite.train import train_step
from megalite.train.train_step import MIN_LOSSES
from megalite.train.trainer import start_trainer
from megalite.utils.hardware.host_memory import AsyncValues
from tests.live_ranks import run_ranks

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,  # item(), bool(), int() and float()
    aten.equal.default,
    aten.nonzero.default,  # and whatever else has a size that depends on values
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
METHODS = ("tolist", "numpy", "cpu", "__array__")
"""Methods that copy to the host, and that are not operators for tensors on a CPU."""

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=90,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
ADAM = OptimizerConfig(lr=1e-3, initial_loss_scale=64.0, loss_scale_window=2)
CONFIG = Config(
    model=MODEL,
    optimizer=ADAM,
    data=DataConfig(mock_data=True),
    training=TrainingConfig(train_iters=100, micro_batch_size=1, eval_iters=0),
)
CASES: dict[str, tuple[str, Config]] = {
    "plain": ("tp1", CONFIG),
    "bf16": ("tp1", replace(CONFIG, model=replace(MODEL, params_dtype="bf16"))),
    "fp16": ("tp1", replace(CONFIG, model=replace(MODEL, params_dtype="fp16"))),
    "fp64": ("tp1", replace(CONFIG, model=replace(MODEL, params_dtype="fp64"))),
    "no clipping": ("tp1", replace(CONFIG, optimizer=replace(ADAM, clip_grad=0.0))),
    "spikes": ("tp1", replace(CONFIG, training=replace(CONFIG.training, check_for_spiky_loss=True))),
    "documents": (
        "tp1",
        replace(CONFIG, data=DataConfig(mock_data=True, reset_attention_mask=True, eod_mask_loss=True)),
    ),
    "recomputed": ("tp1+full", CONFIG),
    "sequence parallel": ("tp2+sp", CONFIG),
    "pipeline": ("pp2zb", CONFIG),
    "zero 1": ("dp2+zero1+gather", CONFIG),
    "zero 2": ("dp2+zero2", CONFIG),
    "zero 3": ("dp2+zero3", CONFIG),
    "zero 3 in a pipeline": ("pp2zbdp2+zero3", CONFIG),
}


class HostReads(Reader):
    """Records the memory of each number that the host reads."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def reads(self, func: Any) -> bool:
        return func in READS

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        self.seen.append(args[0].untyped_storage().data_ptr())

    def recording(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of tensors to record its reads."""

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(tensor.untyped_storage().data_ptr())
            return method(tensor, *args, **kwargs)

        return noted


def count_reads(topology: Topology, config: Config, num_iterations: int) -> list[tuple[int, int]]:
    """Return the numbers of reads in each iteration: of the packed tensor, and of all others.

    The loss scaler's tensors do not count.
    """
    with start_trainer(config, topology) as trainer:
        of_scaler = {
            value.untyped_storage().data_ptr()
            for value in vars(trainer.optimizer.scaler).values()
            if isinstance(value, torch.Tensor)
        }
        packed: list[AsyncValues] = []

        class Noted(AsyncValues):
            def __init__(self, values: torch.Tensor) -> None:
                super().__init__(values)
                packed.append(self)

        counts = []
        for _ in range(num_iterations):
            packed.clear()
            with pytest.MonkeyPatch.context() as patch, HostReads() as reads:
                patch.setattr(train_step, "AsyncValues", Noted)
                for name in METHODS:
                    patch.setattr(torch.Tensor, name, reads.recording(getattr(torch.Tensor, name)))
                result = trainer.step()
            assert not result.skipped, result
            (one,) = packed
            place = one._values.untyped_storage().data_ptr()
            others = [each for each in reads.seen if each != place and each not in of_scaler]
            counts.append((reads.seen.count(place), len(others)))
        return counts


@pytest.mark.parametrize("case", CASES)
def test_an_iteration_reads_loss_and_norm_in_one_piece_and_nothing_else(case: str) -> None:
    name, config = CASES[case]
    layout = Layout.parse(name)
    config = layout.apply(config, 2 * layout.size("dp"))
    num_iterations = MIN_LOSSES + 2 if case == "spikes" else 2
    for counts in run_ranks(count_reads, config.parallel.mesh, layout.world_size, config, num_iterations):
        assert counts == [(2, 0)] * num_iterations


def test_reads_are_seen() -> None:
    x = torch.arange(3.0)
    for read in (
        lambda: x[0].item(),
        lambda: bool(x[0]),
        lambda: float(x[1]),
        lambda: x.nonzero(),
        lambda: torch.equal(x, x),
        lambda: x.masked_select(x > 1.0),
    ):
        with HostReads() as reads:
            read()
        assert reads.seen, read
