"""Which models are timed, what is refused, and how a step's figures are counted."""

from __future__ import annotations

from types import ModuleType

import pytest

from megalite.config.model.model_config import padded_vocab_size
from megalite.plan.units import whole_model
from megalite.utils.errors import UserError


@pytest.fixture
def train_step(scripts: None) -> ModuleType:
    import train_step

    return train_step


def cpu_of(train_step: ModuleType, gigabytes: float):
    return train_step.Machine("cpu", "CPU", None, gigabytes * 1e9)


def arguments_of(train_step: ModuleType, line: str):
    args = train_step.parse_arguments(line.split())
    args.params_dtype = args.params_dtype or "fp32"
    return args


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-0.1b", 0.125), ("gpt-1.3b", 1.3), ("gpt-2.7b", 2.65), ("gpt-7b", 6.66), ("bloom-20b-slice", 23.3)],
)
def test_models_have_their_size(train_step: ModuleType, name: str, billions: float) -> None:
    """GPT's as the paper's table has them; BLOOM's 8 layers are 20 billion without the table of words."""
    named = train_step.named_model(arguments_of(train_step, f"--model {name}"), 0.0)
    assert whole_model(named.model, named.tp).num_parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert named.model.vocab_size == padded_vocab_size(named.model, named.tp)


def test_a_shape_of_ones_own_keeps_the_size_of_a_head(train_step: ModuleType) -> None:
    words = "--model bloom-20b-slice --hidden 3584 --layers 2 --vocab-size 1000 --seq-length 64"
    model, tp = train_step.named_model(arguments_of(train_step, words), 0.1)
    assert (model.num_layers, model.num_attention_heads, model.head_dim, tp) == (2, 8, 448, 8)
    assert (model.vocab_size, model.seq_length, model.hidden_dropout) == (1024, 64, 0.1)


def test_too_large_a_model_is_refused_with_what_fits(train_step: ModuleType) -> None:
    with pytest.raises(UserError) as refused:
        train_step.config_that_fits(arguments_of(train_step, "--model gpt-7b"), 0.0, cpu_of(train_step, 24))
    text = str(refused.value)
    assert text.startswith("--model gpt-7b in fp32 with --micro-batch-size 1 needs 13")
    assert (
        "24.0 GB are free: small, small-llama, small-experts, gpt-0.1b, gpt-7b with --layers 4 would fit"
        in text
    )
    assert "\n" not in text
    four = arguments_of(train_step, "--model gpt-7b --layers 4")
    train_step.config_that_fits(four, 0.0, cpu_of(train_step, 24))
    with pytest.raises(UserError, match="no model that has a name would fit"):
        train_step.config_that_fits(arguments_of(train_step, ""), 0.0, cpu_of(train_step, 0.1))


def test_flags_of_training_go_through(train_step: ModuleType) -> None:
    args = arguments_of(train_step, "")
    args.flags = "--cross-entropy-chunks 4 --lr 1e-3"
    config = train_step.config_that_fits(args, 0.1, cpu_of(train_step, 24))
    assert (config.recompute.cross_entropy_chunks, config.optimizer.lr) == (4, 1e-3)
    assert (config.model.hidden_dropout, config.training.micro_batch_size) == (0.1, 2)
    args.flags = "--num-layer 3"
    with pytest.raises(UserError, match="nearest is --num-layers"):
        train_step.config_that_fits(args, 0.1, cpu_of(train_step, 24))


def test_a_gpu_gets_the_largest_micro_batch_that_fits(train_step: ModuleType) -> None:
    gpu = train_step.Machine("cuda", "NVIDIA H200", 989.0, 80e9)
    args = arguments_of(train_step, "--model gpt-1.3b --params-dtype bf16")
    size = train_step.config_that_fits(args, 0.0, gpu).training.micro_batch_size
    more = train_step.config_that_fits(args, 0.0, gpu._replace(free=140e9)).training.micro_batch_size
    assert 1 < size < more <= 16


@pytest.mark.parametrize(
    ("line", "free", "reason"),
    [
        ("", 1.6, "it needs 1.6 GB by the plan"),
        ("--model small-llama", 24.0, "a whole GPT-2 alone"),
        ("--no-plain", 24.0, None),
    ],
)
def test_plain_pytorch_is_left_out_with_a_reason(
    train_step: ModuleType, line: str, free: float, reason: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = cpu_of(train_step, free)
    args = arguments_of(train_step, line)
    config = train_step.config_that_fits(args, 0.0, machine)
    assert set(train_step.works(config, args, machine)) == {"megalite", "product"}
    assert (reason or "") in capsys.readouterr().out


def test_a_row_counts_one_rank_s_share(train_step: ModuleType) -> None:
    """2048 tokens in two seconds on one rank of eight, beside 20 products of 8192^3 in a tenth of one."""
    from turns import Measured

    args = arguments_of(train_step, "--model bloom-20b-slice --params-dtype bf16 --micro-batch-size 1")
    gpu = train_step.Machine("cuda", "NVIDIA H200", 989.0, 140e9)
    config = train_step.config_that_fits(args, 0.0, gpu)
    took = {"megalite": [2.0, 1.0, 3.0], "product": [0.1]}
    measured = {name: Measured(seconds, seconds, [], 60e9, 0) for name, seconds in took.items()}
    cells = train_step.row(0.0, config, gpu, measured).split()
    # 6 x (8 x (12 h^2 + s h) + v h) a token, of which this rank computes an eighth.
    flops = 6 * (8 * (12 * 14336**2 + 2048 * 14336) + 250880 * 14336) / 8
    tflops, product = 1024 * flops / 1e12, 2 * 8192**3 * 20 / 0.1 / 1e12
    assert cells[:5] == ["0.0", "1024", "-", "-", "-"]
    assert float(cells[5]) == pytest.approx(tflops, rel=0.01)
    assert float(cells[6]) == pytest.approx(product, rel=0.01)
    assert cells[7:] == [f"{tflops / product:.1%}", f"{tflops / 989:.1%}", "60.0", "-"]
