"""Flags of Megatron-LM and Megatron-DeepSpeed that are no fields here.

Each is accepted with a reason why nothing is to be done, or refused by name: no flag is ignored in silence.
A flag that becomes a field leaves its table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megalite.cli.deepspeed import check_file
from megalite.cli.findings import Findings
from megalite.cli.future import FUTURE
from megalite.cli.words import Given
from megalite.config import Config


@dataclass(frozen=True)
class Line:
    """What a flag's rule may look at besides the flag: the whole command line.

    Attributes:
        config: what fields, YAML file and preset come to.
        flags: all flags given, by their name with dashes.
        world_size: number of ranks, where the launcher says it.
    """

    config: Config
    flags: Mapping[str, Given]
    world_size: int | None

    def word(self, flag: str) -> str | None:
        """The word after a flag; None where the flag is not given or stands alone."""
        given = self.flags.get(flag)
        return given.words[0] if given and given.words else None


Rule = Callable[[Given, Line, Findings], None]


def _accepted(why: str, num_words: int = 0) -> Rule:
    """A flag that asks for nothing that is not so already."""

    def rule(given: Given, line: Line, findings: Findings) -> None:
        if len(given.words) != num_words:
            wanted = "no value" if num_words == 0 else "one value"
            findings.problems.append(
                f"{given.name} takes {wanted}, but got {' '.join(given.words) or 'none'}"
            )
        else:
            findings.notices.append(f"{' '.join((given.name, *given.words))} needs nothing here: {why}")

    return rule


def _only(value: str, why: str) -> Rule:
    """A flag whose one value is how things are here; another value is refused."""

    def rule(given: Given, line: Line, findings: Findings) -> None:
        if given.words == (value,):
            findings.notices.append(f"{given.name} {value} needs nothing here: {why}")
        else:
            got = " ".join(given.words) or "no value"
            findings.problems.append(f"{given.name} takes {value} alone in this version, not {got}: {why}")

    return rule


def _not_yet(what: str, fix: str) -> Rule:
    """A flag of something that megalite has not."""

    def rule(given: Given, line: Line, findings: Findings) -> None:
        findings.problems.append(f"{given.name} ({what}) is not in this version: {fix}")

    return rule


def _zero_stage(given: Given, line: Line, findings: Findings) -> None:
    """Tells users of BLOOM's scripts of a difference; the flag itself is a field."""
    if given.words == ("0",) and line.config.model.params_dtype == "bf16":
        findings.notices.append(
            f"{given.name} 0: every data-parallel rank holds the whole optimizer state; BLOOM's bf16 "
            "optimizer shared it out (ZeRO stage 1) at stage 0 too: give --zero-stage 1 for that"
        )


def _gradients_in_fp32(given: Given, line: Line, findings: Findings) -> None:
    dtype = line.config.parallel.grad_communication_dtype
    if dtype in ("bf16", "fp16"):
        findings.problems.append(
            f"{given.name} and --grad-communication-dtype {dtype} contradict each other: leave one out"
        )
    else:
        _accepted(_IN_FULL)(given, line, findings)


def _deepspeed_config(given: Given, line: Line, findings: Findings) -> None:
    if len(given.words) != 1:
        findings.problems.append(f"{given.name} takes one value, the DeepSpeed JSON file")
        return
    check_file(given.words[0], line.config, line.world_size, findings)


def _group_query_attention(given: Given, line: Line, findings: Findings) -> None:
    if line.config.model.num_query_groups is None:
        findings.problems.append(f"{given.name} needs --num-query-groups: give it, or remove {given.name}")
    else:
        findings.notices.append(f"{given.name} needs nothing here: --num-query-groups turns it on")


def _local_rank(given: Given, line: Line, findings: Findings) -> None:
    """Old launchers pass on the command line what they also put into LOCAL_RANK, where it is read from."""
    if " ".join(given.words) != os.environ.get("LOCAL_RANK"):
        findings.problems.append(
            f"{given.name} {' '.join(given.words)} is not LOCAL_RANK={os.environ.get('LOCAL_RANK', '')} "
            "of the environment, which counts: start with torchrun, or set LOCAL_RANK"
        )


_SAME_ANYWHERE = "initial weights are the same on any device and in any layout"
_NO_WORKERS = "samples are read from mapped files, which takes no worker processes"
_FUSION = "what runs fused is chosen by what is fastest on the device, and told at start-up"
_NO_RNG_STATE = (
    "there is no random state: weights, dropout and the order of samples follow from --seed and counters"
)
_IN_FULL = "softmax, the sums of gradients and what crosses between ranks of them are in fp32 at the least"

_RULES: dict[str, Rule] = {
    "--data-impl": _only("mmap", "corpora are mapped .bin/.idx files"),
    "--dataloader-type": _only("single", "each run goes once through the samples, in their shuffled order"),
    "--transformer-impl": _only("local", "layers are this package's own"),
    "--abort-on-unmet-fused-kernel-constraints": _accepted(
        "no kernel has a shape that it does not take, and what each runs on is told at start-up"
    ),
    "--sync-tp-duplicated-parameters": _accepted(
        "weights that tensor-parallel ranks hold in common get the same gradient on each, and stay equal"
    ),
    "--deepspeed": _accepted("there is no DeepSpeed here; --deepspeed_config is read and checked"),
    "--deepspeed-config": _deepspeed_config,
    "--group-query-attention": _group_query_attention,
    "--local-rank": _local_rank,
    "--fim-data": _accepted("--fim-rate above 0 turns it on"),
    "--num-workers": _accepted(_NO_WORKERS, 1),
    "--valid-num-workers": _accepted(_NO_WORKERS, 1),
    "--no-load-rng": _accepted(_NO_RNG_STATE),
    "--no-save-rng": _accepted(_NO_RNG_STATE),
    "--use-cpu-initialization": _accepted(_SAME_ANYWHERE),
    "--use-mcore-models": _accepted("there is one implementation of each model"),
    "--no-query-key-layer-scaling": _accepted("attention scores are never scaled by the layer's number"),
    "--attention-softmax-in-fp32": _accepted(_IN_FULL),
    "--accumulate-allreduce-grads-in-fp32": _gradients_in_fp32,
    "--log-learning-rate-to-tensorboard": _accepted("it is always written"),
    "--log-loss-scale-to-tensorboard": _accepted("it is always written"),
    "--log-world-size-to-tensorboard": _accepted("it is always written"),
    "--no-barrier-with-level-1-timing": _accepted("no timer makes ranks wait for each other"),
    "--no-masked-softmax-fusion": _accepted(_FUSION),
    "--no-bias-gelu-fusion": _accepted(_FUSION),
    "--no-bias-swiglu-fusion": _accepted(_FUSION),
    "--no-bias-dropout-fusion": _accepted(_FUSION),
    "--no-rope-fusion": _accepted(_FUSION),
}


REMARKS: dict[str, Rule] = {"--zero-stage": _zero_stage}
"""Fields' own flags, of which users of other programs must be told something."""


def legacy_rules() -> dict[str, Rule]:
    """The rule of every flag that is no field, by its name with dashes."""
    future = {f"--{flag}": _not_yet(what, fix) for what, fix, flags in FUTURE for flag in flags.split()}
    return {**future, **_RULES}


def legacy_help() -> list[tuple[str, list[str]]]:
    """Flags that are no fields, by what becomes of them, for the help text."""
    accepted = sorted(_RULES)
    future = sorted(f"--{flag}" for entry in FUTURE for flag in entry.flags.split())
    return [
        (
            "accepted for the sake of existing command lines, with a line that says why nothing is needed",
            accepted,
        ),
        ("known, and refused until they are here", future),
    ]
