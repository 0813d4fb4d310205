"""Layers and modules that are recomputed, by the flags of either Megatron, and what is rejected."""

import shlex

import pytest

from megalite.config import RecomputeConfig, check_config
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError


def recompute(line):
    return parse(shlex.split(line))[0].recompute


def layers(line, num_layers):
    """Return the layers of each recomputed group."""
    groups = recompute(line).groups(num_layers)
    assert [layer for group, _ in groups for layer in group] == list(range(num_layers))
    return [list(group) for group, is_recomputed in groups if is_recomputed]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("--recompute-granularity selective", []),
        ("--recompute-granularity full", [[0], [1], [2], [3], [4]]),
        ("--checkpoint-activations", [[0], [1], [2], [3], [4]]),
        ("--deepspeed-activation-checkpointing --checkpoint-activations", [[0], [1], [2], [3], [4]]),
        ("--checkpoint-activations --checkpoint-num-layers 2", [[0, 1], [2, 3], [4]]),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 5",
            [[0, 1, 2, 3, 4]],
        ),
        ("--recompute-granularity full --recompute-method block", [[0]]),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", [[0], [1], [2]]),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 9",
            [[0], [1], [2], [3], [4]],
        ),
    ],
)
def test_layers_that_are_recomputed(line, expected):
    assert layers(line, 5) == expected


def test_parts_that_are_recomputed():
    assert recompute("--recompute-activations").modules == {"core_attn"}
    line = "--recompute-granularity selective --recompute-modules layernorm mlp_act"
    assert recompute(line).modules == {"layernorm", "mlp_act"}
    assert recompute("--recompute-granularity full --recompute-modules layernorm").modules == set()
    assert RecomputeConfig().modules == set()


def test_a_module_is_named_once():
    assert recompute("--recompute-modules mlp layernorm moe mlp").recompute_modules == ("mlp", "layernorm")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--recompute-granularity full --recompute-num-layers 13",
            "--recompute-num-layers 13 is above --num-layers 12",
        ),
        (
            "--recompute-activations --recompute-modules mlp_act mlp",
            "--recompute-modules mlp_act mlp names mlp and its part mlp_act: remove one of them",
        ),
        (
            "--recompute-modules moe_act",
            "remove it: experts always compute their activation again in backward",
        ),
        ("--recompute-modules norms", "choose one of core_attn, mla_up_proj, mlp, mlp_act, layernorm"),
        ("--checkpoint-activations --recompute-activations", "set the same option: remove one"),
        ("--recompute-num-layers 0 --checkpoint-activations", "must be greater than 0"),
        (
            "--checkpoint-activations --distribute-saved-activations --seq-length 9 --tp 2",
            "--seq-length 9, which is not divisible by --tp 2",
        ),
        (
            "--num-layers 4 --cpu-offload-activations 5",
            "the model has 4 layers: pass at most --cpu-offload-activations 4",
        ),
        ("--num-layers 4 --pp 2 --cpu-offload-activations 3", "--pp 2 stages have at most 2 layers: pass"),
        ("--cpu-offload-activations -1", "-1 is out of range: it must be at least 0"),
        ("--cpu-offloading-weights", "--cpu-offloading-weights (weights in host memory) is not supported"),
        (
            "--sequence-parallel --seq-length 1023 --tp 4",
            "--sequence-parallel with --seq-length 1023, which is not divisible by --tp 4: "
            "use a multiple of it, such as 1024, or another --tp",
        ),
    ],
)
def test_what_cannot_be_is_refused(line, message):
    with pytest.raises(ConfigError) as caught:
        check_config(parse(shlex.split(f"{line} --train-iters 1 --mock-data --vocab-size 9"))[0])
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]


@pytest.mark.parametrize(
    ("line", "idle"),
    [
        ("--sequence-parallel", ["--sequence-parallel"]),
        ("--sequence-parallel --tp 2", []),
        ("--recompute-activations --recompute-num-layers 2", ["--recompute-num-layers"]),
        ("--recompute-method block", ["--recompute-method"]),
        ("--checkpoint-activations --recompute-modules mlp", ["--recompute-modules"]),
        ("--checkpoint-activations --distribute-saved-activations", ["--distribute-saved-activations"]),
        ("--checkpoint-activations --partition-activations --tp 2", []),
        (
            "--checkpoint-activations --partition-activations --tp 2 --sequence-parallel",
            ["--distribute-saved-activations"],
        ),
    ],
)
def test_what_does_nothing_is_told(line, idle):
    _, notices = parse(shlex.split(line))
    assert [notice.split()[0] for notice in notices] == idle


def test_offloaded_layers_by_either_name() -> None:
    assert recompute("--cpu-offload-activations 2").cpu_offload_activations == 2
    assert recompute("--cpu-offloading-num-layers 2 --cpu-offloading").cpu_offload_activations == 2
