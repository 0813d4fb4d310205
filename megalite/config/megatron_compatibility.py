"""Flags of Megatron-LM and Megatron-DeepSpeed that are not fields of the config."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config.arguments import Diagnostics, FlagTokens
from megalite.config.config import Config
from megalite.config.deepspeed import check_deepspeed_file


@dataclass(frozen=True)
class CommandLine:
    """Hold the whole command line, for the rule of one of its flags.

    Attributes:
        config: the config of fields, YAML file and preset.
        flags: all flags, by their name with dashes.
        world_size: number of ranks, if the launcher sets it.
    """

    config: Config
    flags: Mapping[str, FlagTokens]
    world_size: int | None


FlagRule = Callable[[FlagTokens, CommandLine, Diagnostics], None]


def _not_needed(why: str, num_values: int = 0) -> FlagRule:
    """Return the rule of a flag that requests what is always the case."""

    def rule(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
        if len(flag.values) != num_values:
            wanted = "no value" if num_values == 0 else "one value"
            diagnostics.add_problem(f"{flag.name} takes {wanted}, but got {' '.join(flag.values) or 'none'}")
        else:
            diagnostics.notices.append(f"{' '.join((flag.name, *flag.values))} is not needed: {why}")

    return rule


def _only(value: str, why: str) -> FlagRule:
    """Return the rule of a flag that has one supported value, which is always used."""

    def rule(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
        if flag.values == (value,):
            diagnostics.notices.append(f"{flag.name} {value} is not needed: {why}")
        else:
            found = " ".join(flag.values) or "no value"
            diagnostics.add_problem(f"{flag.name} only accepts {value} in this version, not {found}: {why}")

    return rule


def _unsupported(what: str, fix: str) -> FlagRule:
    def rule(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
        diagnostics.add_problem(f"{flag.name} ({what}) is not supported in this version: {fix}")

    return rule


def _zero_stage(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    """Warn users of BLOOM's scripts of a difference; the flag itself is a field."""
    if flag.values == ("0",) and line.config.model.params_dtype == "bf16":
        diagnostics.notices.append(
            f"{flag.name} 0: every data-parallel rank holds the whole optimizer state. BLOOM's bf16 "
            "optimizer sharded it at stage 0 too: pass --zero-stage 1 for that"
        )


def _gradients_in_fp32(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    dtype = line.config.parallel.grad_communication_dtype
    if dtype in ("bf16", "fp16"):
        diagnostics.add_problem(
            f"{flag.name} and --grad-communication-dtype {dtype} contradict each other: remove one"
        )
    else:
        _not_needed(_IN_FP32)(flag, line, diagnostics)


def _deepspeed_config(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    if len(flag.values) != 1:
        diagnostics.add_problem(f"{flag.name} takes one value, the DeepSpeed JSON file")
    else:
        check_deepspeed_file(flag.values[0], line.config, line.world_size, diagnostics)


def _group_query_attention(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    if line.config.model.num_query_groups is None:
        diagnostics.add_problem(f"{flag.name} needs --num-query-groups: pass it, or remove {flag.name}")
    else:
        diagnostics.notices.append(f"{flag.name} is not needed: --num-query-groups turns it on")


def _local_rank(flag: FlagTokens, line: CommandLine, diagnostics: Diagnostics) -> None:
    """Compare with LOCAL_RANK, which is used: old launchers set both."""
    if " ".join(flag.values) != os.environ.get("LOCAL_RANK"):
        diagnostics.add_problem(
            f"{flag.name} {' '.join(flag.values)} differs from LOCAL_RANK={os.environ.get('LOCAL_RANK', '')} "
            "in the environment, which is used: start with torchrun, or set LOCAL_RANK"
        )


_SAME_ANYWHERE = "initial weights are the same on any device and in any layout"
_NO_WORKERS = "samples are read from memory-mapped files, without worker processes"
_FUSION = "the fastest kernel on the device is chosen, and logged at start-up"
_NO_RNG_STATE = (
    "there is no random state: weights, dropout and the order of samples follow from --seed and counters"
)
_IN_FP32 = "softmax, gradient sums and their communication are at least in fp32"

_RULES: dict[str, FlagRule] = {
    "--data-impl": _only("mmap", "corpora are memory-mapped .bin/.idx files"),
    "--dataloader-type": _only("single", "a run reads the shuffled samples once, in order"),
    "--transformer-impl": _only("local", "layers are megalite's own"),
    "--abort-on-unmet-fused-kernel-constraints": _not_needed(
        "kernels accept every shape, and the start-up log names those that run"
    ),
    "--sync-tp-duplicated-parameters": _not_needed(
        "parameters that tensor-parallel ranks duplicate get equal gradients on each rank, and stay equal"
    ),
    "--deepspeed": _not_needed("megalite does not use DeepSpeed; --deepspeed_config is read and checked"),
    "--deepspeed-config": _deepspeed_config,
    "--group-query-attention": _group_query_attention,
    "--local-rank": _local_rank,
    "--fim-data": _not_needed("--fim-rate above 0 turns it on"),
    "--num-workers": _not_needed(_NO_WORKERS, 1),
    "--valid-num-workers": _not_needed(_NO_WORKERS, 1),
    "--no-load-rng": _not_needed(_NO_RNG_STATE),
    "--no-save-rng": _not_needed(_NO_RNG_STATE),
    "--use-cpu-initialization": _not_needed(_SAME_ANYWHERE),
    "--use-mcore-models": _not_needed("there is one implementation of each model"),
    "--no-query-key-layer-scaling": _not_needed("attention scores are never scaled by the layer number"),
    "--attention-softmax-in-fp32": _not_needed(_IN_FP32),
    "--accumulate-allreduce-grads-in-fp32": _gradients_in_fp32,
    "--log-learning-rate-to-tensorboard": _not_needed("it is always logged"),
    "--log-loss-scale-to-tensorboard": _not_needed("it is always logged"),
    "--log-world-size-to-tensorboard": _not_needed("it is always logged"),
    "--no-barrier-with-level-1-timing": _not_needed("timers never make ranks wait for each other"),
    "--no-masked-softmax-fusion": _not_needed(_FUSION),
    "--no-bias-gelu-fusion": _not_needed(_FUSION),
    "--no-bias-swiglu-fusion": _not_needed(_FUSION),
    "--no-bias-dropout-fusion": _not_needed(_FUSION),
    "--no-rope-fusion": _not_needed(_FUSION),
}


REMARKS: dict[str, FlagRule] = {"--zero-stage": _zero_stage}
"""Flags of fields that users of other programs need a notice about."""


def megatron_rules() -> dict[str, FlagRule]:
    """Return the rule of every flag that is not a field's, by its name with dashes."""
    unsupported = {
        f"--{flag}": _unsupported(entry.what, entry.fix)
        for entry in UNSUPPORTED
        for flag in entry.flags.split()
    }
    return {**unsupported, **_RULES}


def megatron_help() -> list[tuple[str, list[str]]]:
    """Return the flags that are not fields' for the help text, under two titles."""
    unsupported = sorted(f"--{flag}" for entry in UNSUPPORTED for flag in entry.flags.split())
    return [
        ("accepted for existing command lines, but not needed (the log says why)", sorted(_RULES)),
        ("not supported yet: an error says what to use instead", unsupported),
    ]


class UnsupportedFeature(NamedTuple):
    """Name a feature of Megatron's that megalite does not have.

    Attributes:
        what: its name.
        fix: what to do instead.
        flags: the flags that request it, without their dashes.
    """

    what: str
    fix: str
    flags: str


UNSUPPORTED = (
    UnsupportedFeature(
        "this precision",
        "remove it; with --bf16 and --fp16 the loss is in fp32 and hidden states in 16 bits",
        """
        fp16-lm-cross-entropy fp32-residual-connection
        """,
    ),
    UnsupportedFeature(
        "activations in host memory",
        "remove it; --recompute-granularity full also saves activation memory",
        """
        checkpoint-in-cpu
        """,
    ),
    UnsupportedFeature(
        "context parallelism",
        "remove it",
        """
        context-parallel-size cp-comm-type
        """,
    ),
    UnsupportedFeature(
        "mixture of experts",
        "remove it to train a dense model",
        """
        num-experts expert-model-parallel-size moe-router-topk moe-grouped-gemm
        """,
    ),
    UnsupportedFeature(
        "an optimizer in host memory",
        "remove it; --zero-stage 1 shards the optimizer state over data-parallel ranks",
        """
        cpu-optimizer cpu-torch-adam
        """,
    ),
    UnsupportedFeature(
        "this option of fill-in-the-middle",
        "remove it: whole documents are split, and samples end with the tokenizer's end-of-document token",
        """
        fim-split-sample fim-fragment-rate fim-no-prefix fim-pad-token fim-eod-token
        """,
    ),
    UnsupportedFeature(
        "this model option",
        "remove it, or choose another --preset",
        """
        squared-relu apply-query-key-layer-scaling apply-residual-connection-post-layernorm
        rotary-percent rotary-seq-len-interpolation-factor qk-layernorm apply-layernorm-1p
        multi-latent-attention openai-gelu glu-activation
        """,
    ),
    UnsupportedFeature(
        "this optimizer option",
        "remove it",
        """
        sgd-momentum decoupled-lr
        """,
    ),
    UnsupportedFeature(
        "another checkpoint format",
        "remove it: checkpoints are safetensors files that any layout loads; see --load and --save",
        """
        ckpt-format dist-ckpt-format universal-checkpoint
        """,
    ),
    UnsupportedFeature(
        "this kind of non-persistent checkpoint",
        "remove it: each rank saves its own state to --non-persistent-local-ckpt-dir",
        """
        non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
        """,
    ),
    UnsupportedFeature(
        "this log or profiler",
        "remove it; see --metrics-file, --tensorboard-dir, --profile-execution and --log-straggler-interval",
        """
        disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count codecarbon-dir log-level
        """,
    ),
)
"""A new feature removes its flags from here."""
