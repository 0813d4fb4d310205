#!/usr/bin/env python
"""Plan the command line of a Megatron-LM run, and what each flag that it lacks would gain.

PYTHONPATH=. python benchmarks/plan_for.py megatron --gpu h100 --world-size 64 FLAGS OF pretrain_gpt.py

The cluster's flags are those of `megalite plan`, all others Megatron-LM's. Flags of Megatron-LM that the plan
has no model of are named. A gain is the change of the planned time and memory with one more flag, among those
that Megatron-LM would accept in this command line.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from benchmarks.megatron_settings import WHOLE, MegatronSettings
from benchmarks.other_programs import OtherPlan, request_of
from megalite.config.arguments import FlagTokens, split_tokens
from megalite.config.fields import fields_by_flag
from megalite.config.recompute import Module
from megalite.frontends.megatron.rules import accepted_flags, missing_feature
from megalite.frontends.tool_parser import positive_int
from megalite.plan.plan_report import plan_lines
from megalite.plan.plan_request import Request
from megalite.plan.planned_run import run_problems
from megalite.plan.uncertainty import HOST_BOUND
from megalite.utils.commands import run_main
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import find_gpu

OFF_IN_MEGATRON = ("--overlap-grad-reduce", "--overlap-param-gather")
"""Flags that are on by default here and off in Megatron-LM."""
NO_MODEL = (
    *("--fine-grained-activation-offloading", "--use-nccl-ub"),
    *("--moe-paged-stash", "--moe-permute-fusion", "--moe-router-fusion", "--moe-shared-expert-overlap"),
    "--delay-wgrad-compute",
)
"""Flags of Megatron-LM that may save time or memory, and of which the plan has no model."""
ASSUMED = ("--moe-router-force-load-balancing",)
"""Flags of Megatron-LM whose effect each plan has."""
ONLY_OF_EXPERTS = ("--moe", "--delay-wgrad-compute")
"""What begins the flags of `NO_MODEL` that Megatron-LM accepts with experts alone."""
MESSAGES_OVERLAP = "--overlap-moe-expert-parallel-comm"
_WITHOUT_EFFECT = ("checkpoint", "logging")
"""Groups of flags that change no plan."""
_GRAPH_SCOPES = ("--cuda-graph-scope", "--cuda-graph-modules")
_SHOWN = 0.0005  # of the time
_SCOPES = ("attn", "moe_router")
"""Scopes of CUDA graphs that a plan has a model of."""
_DISPATCHERS = ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend", "--moe-enable-deepep")
_LAYOUT, _PP = "--pipeline-model-parallel-layout", ("--pipeline-model-parallel-size", "--pp")
_LOSS_FUSIONS = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl")
_CLUSTER, _YAML = ("--gpu", "--world-size"), "--yaml-cfg"
_GRAPHS = ("none", "local", "transformer_engine", WHOLE)
_OFFLOAD, _PRECISION_AWARE = "--optimizer-cpu-offload", "--use-precision-aware-optimizer"
_RECOMPUTED, _GRANULARITY = "--recompute-modules", "--recompute-granularity"


@dataclass(frozen=True)
class MegatronRun:
    """Run of Megatron-LM: its settings that megalite does not have, and its flags that megalite has."""

    settings: MegatronSettings
    flags: tuple[FlagTokens, ...]

    def with_flag(self, text: str) -> MegatronRun:
        """Return the run with another flag, which replaces one of the same name."""
        (flag,), _ = split_tokens(text.split())
        return replace(self, flags=(*(each for each in self.flags if each.flag != flag.flag), flag))

    def with_settings(self, **changes: Any) -> MegatronRun:
        """Return the run with other settings."""
        return replace(self, settings=replace(self.settings, **changes))

    @cached_property
    def planned(self) -> tuple[Request, OtherPlan]:
        """Return the request and the plan.

        Raises:
            UserError: the flags are invalid.
        """
        names = {flag.flag for flag in self.flags}
        off = [f"--no{name[1:]}" for name in OFF_IN_MEGATRON if name not in names]
        tokens = [token for flag in self.flags for token in flag.tokens]
        request, plan = request_of(self.settings.program, [*tokens, *off])
        if problems := run_problems(request.config, request.cluster):
            raise UserError(problems[0])
        return replace(request, notices=()), plan


class Command(NamedTuple):
    """Command line of Megatron-LM: its run, and its flags without a model."""

    run: MegatronRun
    not_modelled: tuple[str, ...]


def read_command(arguments: Sequence[str]) -> Command:
    """Read Megatron-LM's flags, and those of the cluster.

    Raises:
        UserError: the cluster's flags are missing, or there is more than flags.
    """
    flags, stray = split_tokens(arguments)
    passed = {flag.flag: flag.values for flag in flags}
    if stray:
        raise UserError(f"{stray[0]!r} does not follow a flag: pass only the flags of pretrain_gpt.py")
    for name in _CLUSTER:
        if len(passed.get(name, ())) != 1:
            raise UserError(f"pass {name} with a value: the plan needs the cluster")
    find_gpu(*passed["--gpu"])
    if _YAML in passed:
        raise UserError(f"{_YAML} is not read: pass its settings as flags")
    kept, unknown = list[FlagTokens](), list[str]()
    for flag in flags:
        field = fields_by_flag().get(flag.flag)
        is_known = field is not None or flag.flag in accepted_flags()
        group = None if is_known else missing_feature(flag.flag)
        topic = field.group if field else group.topic if group else None
        if flag.flag == _LAYOUT and (layers := layers_of_stages(" ".join(flag.values))):
            kept += split_tokens(["--pipeline-layers", *map(str, layers)])[0]
            pp = next((positive_int(" ".join(passed[name])) for name in _PP if name in passed), 1)
            if len(layers) % pp:
                raise UserError(
                    f"{_LAYOUT} has {len(layers)} stages, which is not a multiple of {_PP[0]} {pp}"
                )
            if len(layers) > pp:
                kept += split_tokens([f"--num-virtual-stages-per-pipeline-rank={len(layers) // pp}"])[0]
            continue
        if topic in _WITHOUT_EFFECT or flag.flag in ASSUMED:
            continue
        if flag.flag in NO_MODEL or (group and (topic != "model" or group.of_experts)):
            unknown.append(" ".join((flag.name, *flag.values)))
        elif not flag.flag.startswith(("--fp8", "--fp4", "--tp-comm-overlap")):
            kept.append(flag)
    is_flex = "flex" in passed.get(_DISPATCHERS[0], ()) or _DISPATCHERS[2] in passed
    scopes = {
        value for name in _GRAPH_SCOPES for values in passed.get(name, ()) for value in values.split(",")
    }
    graph = " ".join(passed.get("--cuda-graph-impl", ("none",)))
    if "--enable-cuda-graph" in passed or "--external-cuda-graph" in passed:
        graph = "local"
    if graph not in _GRAPHS:
        raise UserError(f"--cuda-graph-impl {graph}: it is {', '.join(_GRAPHS[:-1])} or {_GRAPHS[-1]}")
    if graph != "none" and "--num-experts" not in passed:
        unknown.append(f"--cuda-graph-impl {graph}")
    modules = passed.get(_RECOMPUTED, ())
    unknown += [f"{_RECOMPUTED} {name}" for name in modules if name == "shared_experts"]
    settings = MegatronSettings(
        *passed["--gpu"],
        recipe=_recipe(passed),
        graphs=frozenset({graph, *scopes} if graph != "none" else ()),
        sends_tokens_once=is_flex,
        recomputes_expert_activation="moe_act" in modules,
        overlaps_tp="--tp-comm-overlap" in passed,
        fuses_loss=passed.get(_LOSS_FUSIONS[1]) == ("te",) and _LOSS_FUSIONS[0] in passed,
        reduces_in_bf16=bool(
            "--grad-reduce-in-bf16" in passed
            or ("--fp16" in passed and "--accumulate-allreduce-grads-in-fp32" not in passed)
        ),
        gathers_rounded=bool({"--fp8-param-gather", "--fp8-param", "--fp4-param-gather"} & passed.keys()),
    )
    return Command(MegatronRun(settings, tuple(_planned_modules(kept))), tuple(unknown))


def layers_of_stages(layout: str) -> list[int]:
    """Return the layers of each stage of Megatron-LM's layout; none if a stage has no layer.

    In `Et*3|(tt|)*28t|mL`, `|` separates stages, t is a layer, and the others are embedding, MTP and loss.
    """
    while repeated := re.search(r"(?:\(([^()]*)\)|([^()*]))\*(\d+)", layout):
        group, letter, count = repeated.groups()
        layout = layout.replace(repeated[0], (group or letter) * int(count), 1)
    counts = [stage.count("t") for stage in layout.split("|")]
    return counts if all(counts) else []


def _planned_modules(flags: Sequence[FlagTokens]) -> Iterator[FlagTokens]:
    """Yield the flags with the recomputed modules that megalite has, for `moe_act` is a setting."""
    for flag in flags:
        values = tuple(name for name in flag.values if name not in ("moe_act", "shared_experts"))
        if flag.flag != _RECOMPUTED or values:
            yield flag._replace(values=values) if flag.flag == _RECOMPUTED else flag


def _recipe(passed: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the recipe of GEMMs in 8 or 4 bits; None in 16 bits."""
    if "--fp4-format" in passed:
        return "nvfp4"
    has_format = {"--fp8-format", "--fp8", "--fp8-hybrid", "--fp8-e4m3"} & passed.keys()
    return " ".join(passed.get("--fp8-recipe", ("delayed",))) if has_format else None


class Gain(NamedTuple):
    """Flags that a command line may lack.

    Attributes:
        flags: as on Megatron-LM's command line; a remark may follow a comma.
        run: the run with the flags.
        has_time, has_memory: whether the plan has a model of their effect.
    """

    flags: str
    run: MegatronRun
    has_time: bool = True
    has_memory: bool = True


def gains(run: MegatronRun) -> Iterator[Gain]:
    """Yield the flags that are off in a run, that its other flags allow, and that the plan has a model of."""
    settings, plan = run.settings, run.planned[1]
    names, planned = {flag.flag for flag in run.flags}, plan.run
    parallel, model = planned.config.parallel, planned.config.model
    shares = planned.num_sharing > 1 and parallel.zero_stage < 3
    if shares and parallel.zero_stage == 0:
        yield _flag(run, "--use-distributed-optimizer")
    if shares and "--overlap-grad-reduce" not in names:
        yield _flag(run, "--overlap-grad-reduce")
    elif shares and parallel.zero_stage and "--overlap-param-gather" not in names:
        yield _flag(run, "--overlap-param-gather")
    if planned.num_sharing > 1 and not settings.reduces_in_bf16:
        yield Gain("--grad-reduce-in-bf16", run.with_settings(reduces_in_bf16=True))
    if planned.tp > 1 and not parallel.sequence_parallel:
        yield _flag(run, "--sequence-parallel")
    elif planned.tp > 1 and not settings.overlaps_tp:
        yield Gain("--tp-comm-overlap", run.with_settings(overlaps_tp=True), has_memory=False)
    if not settings.fuses_loss:
        yield Gain(f"{' '.join(_LOSS_FUSIONS)} te", run.with_settings(fuses_loss=True))
    yield from _recipes(run)
    if model.has_experts and parallel.ep > 1 and not settings.sends_tokens_once:
        text = f"{_DISPATCHERS[0]} flex {_DISPATCHERS[1]} deepep, or hybridep"
        yield Gain(text, run.with_settings(sends_tokens_once=True), has_memory=False)
    if model.has_experts:
        yield from _graphs(run)
    yield from _recomputation(run)
    is_gathered_in_8_bits = settings.gathers_rounded and settings.recipe not in (None, "delayed")
    if parallel.zero_stage in (1, 2) and _OFFLOAD not in names and not is_gathered_in_8_bits:
        text = _OFFLOAD if _PRECISION_AWARE in names else f"{_OFFLOAD} {_PRECISION_AWARE}"
        yield Gain(text, run.with_flag(_OFFLOAD))


def _flag(run: MegatronRun, text: str) -> Gain:
    return Gain(text, run.with_flag(text))


def _graphs(run: MegatronRun) -> Iterator[Gain]:
    """Yield CUDA graphs of parts of layers with experts, and of the iteration."""
    graphs = run.settings.graphs
    if WHOLE in graphs or run.planned[1].run.config.recompute.recompute_granularity == "full":
        return
    for scope in _SCOPES:
        if scope not in graphs:
            more = frozenset(name for name in _SCOPES if name in graphs or name == scope)
            text = f"--cuda-graph-impl transformer_engine {_GRAPH_SCOPES[0]} {' '.join(sorted(more))}"
            yield Gain(text, run.with_settings(graphs=more), has_memory=False)
    text = f"--cuda-graph-impl {WHOLE}, which needs --moe-paged-stash"
    yield Gain(text, run.with_settings(graphs=frozenset({WHOLE})), has_memory=False)


def _recomputation(run: MegatronRun) -> Iterator[Gain]:
    """Yield recomputed modules, and whole layers. The host's time for them is not in a launch-bound plan."""
    plan = run.planned[1]
    granularity, model = plan.run.config.recompute.recompute_granularity, plan.run.config.model
    has_time = not (model.has_experts and plan.time.work.launch > HOST_BOUND * plan.time.seconds)
    if granularity is None:
        modules: list[Module] = ["core_attn", "layernorm", "mlp"]
        modules += ["mla_up_proj"] if model.multi_latent_attention else []
        for module in modules:
            with_module = run.with_flag(f"{_GRANULARITY} selective").with_flag(f"{_RECOMPUTED} {module}")
            name = "moe" if module == "mlp" and model.has_experts else module
            yield Gain(f"{_GRANULARITY} selective {_RECOMPUTED} {name}", with_module, has_time)
    if granularity != "full":
        others = tuple(each for each in run.flags if each.flag != _RECOMPUTED)
        full = replace(run, flags=others).with_flag(f"{_GRANULARITY} full")
        text = f"{_GRANULARITY} full --recompute-method uniform --recompute-num-layers 1"
        yield Gain(text, full, has_time)


def _recipes(run: MegatronRun) -> Iterator[Gain]:
    """Yield the recipes of the GPU's generation, and gathers in 8 bits."""
    settings, gpu = run.settings, find_gpu(run.settings.gpu)
    if settings.recipe and not settings.gathers_rounded and run.planned[1].run.zero_stage:
        gather = "--fp4-param-gather" if settings.recipe == "nvfp4" else "--fp8-param-gather"
        yield Gain(gather, run.with_settings(gathers_rounded=True), has_memory=False)
    if settings.recipe is not None or gpu.fp8_tflops == 0:
        return
    recipes = {
        f"--fp8-format e4m3 --fp8-recipe {recipe}": recipe
        for recipe in ("tensorwise", "mxfp8" if gpu.fp4_tflops else "blockwise")
    }
    if gpu.fp4_tflops and not gpu.has_mxfp4_alone:
        recipes["--fp4-format e2m1 --fp4-recipe nvfp4"] = "nvfp4"
    for text, recipe in recipes.items():
        yield Gain(text, run.with_settings(recipe=recipe), has_memory=False)


def gain_lines(command: Command) -> Iterator[str]:
    """Yield a line a flag: the change of the planned time and memory."""
    plan = command.run.planned[1]
    found, unchanged = [], []
    for gain in gains(command.run):
        try:
            with_flags = gain.run.planned[1]
        except UserError:
            continue  # the other flags exclude it
        time = with_flags.time.seconds / plan.time.seconds - 1 if gain.has_time else math.inf
        if abs(time) < _SHOWN and not gain.has_memory:
            unchanged.append(gain.flags)
            continue
        memory = (with_flags.memory_bytes - plan.memory_bytes) / 1e9
        cells = (
            f"{time:+.1%}" if gain.has_time else "no model",
            f"{memory:+.1f} GB" if gain.has_memory else "no model",
        )
        found.append((time, "".join(f"{cell:>11}" for cell in cells) + f"  {gain.flags}"))
    yield f"{'time':>11}{'memory':>11}  with one more flag"
    yield from (line for _, line in sorted(found))
    if unchanged:
        yield f"no change of the time planned: {'; '.join(unchanged)}"
    has_experts = plan.run.config.model.has_experts
    if has_experts and plan.time.work.ep:
        most = plan.time.work.ep / plan.time.seconds
        yield f"not modelled: {MESSAGES_OVERLAP}, at most {-most:.1%}, the time of its messages"
    offered = NO_MODEL if has_experts else [name for name in NO_MODEL if not name.startswith(ONLY_OF_EXPERTS)]
    passed = {text.split()[0] for text in command.not_modelled}
    graphs = () if has_experts else ("--cuda-graph-impl",)
    yield f"not modelled: {', '.join(name for name in (*offered, *graphs) if name not in passed)}"


def main(arguments: Sequence[str]) -> None:
    """Print the plan of a command line, and the gains."""
    if arguments[:1] != ["megatron"]:
        raise UserError("pass the program: megatron, then --gpu, --world-size and the flags of its run")
    command = read_command(arguments[1:])
    request, plan = command.run.planned
    print("\n".join(plan_lines(request, plan)))
    for text in command.not_modelled:
        print(f"not modelled, and not in this plan: {text}")
    print()
    print("\n".join(gain_lines(command)))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
