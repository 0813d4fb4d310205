"""Models with recurrent layers: what cannot be is refused in one line with what can."""

from dataclasses import replace

import pytest

from megalite.config import Config, DataConfig, ModelConfig, TrainingConfig
from megalite.config.fields import resolved_fields
from megalite.config.validate import problems_of
from megalite.frontends.command_line import parse

RUN = (
    "--preset llama-tiny --mock-data --vocab-size 256 --train-iters 1 --lr 1e-3 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8"
)
MIXER = "--recurrent-mixer gated_delta_net"


def problems_with(flags: str) -> list[str]:
    config, _ = parse(f"{RUN} {flags}".split())
    return problems_of(config, None)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--linear-num-value-heads 6", "pass --linear-num-value-heads 8, or --linear-num-key-heads 3 or 6"),
        ("--tp 8 --num-attention-heads 8 --ffn-hidden-size 192", "is not divisible by --tp 8: pass --tp 4;"),
        ("--tp 3 --num-attention-heads 6 --hidden-size 96 --ffn-hidden-size 96", "pass --tp 2 or 4;"),
        (
            "--tp 2 --cp 4",
            "with --cp 4, over which the 2 of each of 2 tensor-parallel ranks cannot be split: pass --cp 2; ",
        ),
        ("--compile", f"--compile with {MIXER}: "),
        ("--bf16 --fp8", f"--fp8-format hybrid with {MIXER}: recurrent layers need more than 8 bits;"),
        ("--mup-base-width 8", f"--mup-base-width 8 with {MIXER}: "),
        ("--linear-attention-freq 1", f"--linear-attention-freq 1 leaves no layer with {MIXER}: "),
        ("--linear-attention-freq [0]*4", "leaves no layer with"),
        ("--linear-attention-freq [1]*3", "has 3 numbers, not one for each of --num-layers 4"),
        ("--linear-attention-freq [2]*4", "has numbers other than 0 and 1: change them"),
    ],
)
def test_what_cannot_be_is_refused(flags: str, problem: str) -> None:
    found = problems_with(f"{MIXER} {flags}")
    assert sum(problem in each for each in found) == 1, found
    assert not any("linear" in each or "recurrent" in each for each in problems_with(flags))


@pytest.mark.parametrize(
    "flags", ["", "--linear-attention-freq 2", "--linear-attention-freq 0", "--tp 4", "--tp 2 --cp 2"]
)
def test_what_can_be(flags: str) -> None:
    assert problems_with(f"{MIXER} {flags}") == []


def test_a_bert_has_none() -> None:
    config = Config(
        model=ModelConfig(architecture="bert", recurrent_mixer="gated_delta_net"),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1),
    )
    assert any("whose tokens also see later ones: remove it" in each for each in problems_of(config, 1))


def test_patterns_of_the_same_layers_are_the_same_model() -> None:
    model = ModelConfig(num_layers=4, recurrent_mixer="gated_delta_net", linear_attention_freq=(2,))
    assert [spec.attention is None for spec in model.layer_specs] == [True, False] * 2
    same, other = (replace(model, linear_attention_freq=each) for each in ((1, 0, 1, 0), (1, 1, 1, 0)))
    assert resolved_fields(model) == resolved_fields(same) != resolved_fields(other)
    alone = [replace(model, linear_attention_freq=each) for each in (None, (0,), (1, 1, 1, 1))]
    assert resolved_fields(alone[0]) == resolved_fields(alone[1]) == resolved_fields(alone[2])
    assert not any(spec.attention for each in alone for spec in each.layer_specs)


def test_megatrons_name_of_the_mixer() -> None:
    config, _ = parse(f"{RUN} --experimental-attention-variant gated_delta_net".split())
    assert config.model.recurrent_mixer == "gated_delta_net"
