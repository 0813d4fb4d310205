"""Traces of real runs: a collective that an own model lacks is named, and right layouts agree."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import megalite
from megalite import Cut, ParameterSpec, Providers, new_parameter
from megalite.cli.verify import main
from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.verification import Location, locate_difference, verify_layouts
from megalite.utils.errors import UserError

CONFIG = Config(
    model=replace(
        PRESETS["gpt-tiny"], num_layers=2, hidden_size=32, seq_length=16, vocab_size=101, params_dtype="fp64"
    ),
    optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=2, eval_iters=0),
)


class Slice(nn.Module):
    """Multiplies by a rank's slice of a matrix, without a collective."""

    def __init__(self, shape: tuple[int, int], dim: int, context: megalite.LayerContext) -> None:
        super().__init__()
        self.weight = new_parameter(ParameterSpec(shape, Cut("tp", dim), std=0.1), context)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class SumsOutside(nn.Module):
    """Computes x + sum(down(silu(up(norm(x))))); its parts are partial on each rank."""

    def __init__(self, config: megalite.ModelConfig, context: megalite.LayerContext) -> None:
        super().__init__()
        h, ffn = config.hidden_size, config.ffn_size
        self.tp = context.tp
        self.norm = nn.LayerNorm(h)
        self.up, self.down = Slice((ffn, h), 0, context), Slice((h, ffn), 1, context)

    def copied(self, x: Tensor) -> Tensor:
        return copy_to_tensor_parallel(x, self.tp)

    def forward(self, x: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        y = self.down(F.silu(self.up(self.copied(self.norm(x)))))
        return x + reduce_from_tensor_parallel(y, self.tp)


class Uncopied(SumsOutside):
    """Forgets the sum of the input's gradient."""

    def copied(self, x: Tensor) -> Tensor:
        return x


class Random(SumsOutside):
    """Draws random numbers of its own."""

    def copied(self, x: Tensor) -> Tensor:
        return F.dropout(super().copied(x), 0.1)


class RightStage(megalite.SequentialStage):
    """Has layers without a mistake."""

    layer_class: type[SumsOutside] = SumsOutside

    def build_layer(self, number: int) -> nn.Module:
        return self.layer_class(self.config, self.context)


class UncopiedStage(RightStage):
    """Has layers without a collective in backward."""

    layer_class = Uncopied


class RandomStage(RightStage):
    """Has layers with dropout that depends on the layout."""

    layer_class = Random


class Convolution(nn.Module):
    """Adds a causal convolution of the rank's own tokens, without those before them on other cp ranks."""

    def __init__(self, config: megalite.ModelConfig, context: megalite.LayerContext) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.taps = new_parameter(ParameterSpec((config.hidden_size, 3), std=0.5), context)

    def forward(self, x: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        y = F.pad(self.norm(x).permute(1, 2, 0), (2, 0))  # [b, h, 2 + s/cp]
        return x + F.conv1d(y, self.taps[:, None], groups=len(self.taps)).permute(2, 0, 1)


class ConvolutionStage(megalite.SequentialStage):
    """Has convolutions as layers."""

    def build_layer(self, number: int) -> nn.Module:
        return Convolution(self.config, self.context)


def _located(name: str, stage: type[RightStage] | None = None) -> Location:
    layout = Layout.parse(name)
    config, alone = (each.apply(CONFIG, 4) for each in (layout, Layout()))
    return locate_difference(config, alone, layout.world_size, 1, Providers(stage) if stage else None)


@pytest.mark.parametrize(
    ("layout", "stage"),
    [("pp2dp2+zero3+full", None), ("tp2pp2zb+sp", None), ("tp2mbs1", RightStage)],
)
def test_layouts_without_a_mistake_agree(layout: str, stage: type[RightStage] | None) -> None:
    assert _located(layout, stage).text == "no difference in 1 iterations in fp64"


def test_a_collective_that_an_own_layer_lacks_is_named() -> None:
    found = _located("tp2", UncopiedStage)
    assert found.difference is not None
    assert (
        found.difference.what == "gradient of the input of layers.1.up (backward, iteration 1, samples 0-3)"
    )
    assert "the tp ranks add up to the right ones: a sum over tp is missing" in found.text


def test_dropout_that_depends_on_the_layout_is_named() -> None:
    found = _located("mbs1", RandomStage)
    assert "two runs of one rank differ in the input of layers.0.up" in found.text


def test_a_verification_that_fails_names_the_first_difference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megalite"):
        assert not verify_layouts(CONFIG, [Layout.parse("tp2")], 1, providers=Providers(UncopiedStage))
    lines = [record.getMessage() for record in caplog.records]
    assert (
        "tp2: first difference: gradient of the input of layers.1.up (backward, iteration 1, "
        in "\n".join(lines)
    )
    assert lines[-1] == "NOT the same run: see the rows above"


def test_a_convolution_without_the_tokens_of_other_ranks_is_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megalite"):
        assert not verify_layouts(CONFIG, [Layout.parse("cp2")], 1, providers=Providers(ConvolutionStage))
    (row,) = (message for message in caplog.messages if message.startswith("cp2 "))
    assert "lm_loss of iteration 1 differs by" in row
    assert any(
        message.startswith("cp2: first difference: output of layers.0 (forward, iteration 1, samples 0-3)")
        for message in caplog.messages
    )


def test_the_flag_refuses_what_it_does_not_show() -> None:
    with pytest.raises(UserError, match="--worst has no effect with --bisect"):
        main(["--preset", "gpt-tiny", "--vocab-size", "101", "--bisect", "--worst", "3"])


@pytest.mark.parametrize(("layout", "is_unused"), [("tp2", True), ("cp2", False)])
def test_the_program_says_which_options_no_layout_uses(
    layout: str, is_unused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megalite.cli.verify.verify_layouts", lambda *_, **__: True)
    flags = f"--preset gpt-tiny --vocab-size 101 --cp-comm-type p2p p2p p2p a2a --layouts {layout}"
    with pytest.raises(SystemExit):
        main(flags.split())
    assert ("--cp-comm-type p2p p2p p2p a2a has no effect" in capsys.readouterr().out) == is_unused
