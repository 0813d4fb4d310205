#!/usr/bin/env python
"""Compare plans with the published runs of 2025 and 2026, in 16, 8 and 4 bits, by their flags.

PYTHONPATH=. python benchmarks/planner_published.py [--rows] [--open-blind-half]

A line a kind of run: how many rows, the median error in time, and the share within 20%. `--rows` prints each
plan. Rows that the planner refuses are counted with their reason. Fine-tuning is not planned. Intervals are
those of `megalite plan`, from the open half. The blind half was planned once, when the model was final; its
errors are in benchmarks/RESULTS.md, so that it is no longer blind.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from benchmarks.megatron_settings import MegatronSettings
from benchmarks.other_programs import PROGRAMS, OtherPlan, OtherProgram, request_of
from benchmarks.published_rows import BLIND, OPEN, read_rows
from megalite.config import ModelConfig
from megalite.plan.plan_request import read_request
from megalite.plan.planned_run import run_problems
from megalite.plan.uncertainty import OTHER, error_ranges, kind_of_run
from megalite.utils.errors import UserError, first_line

Row = Mapping[str, str]
MODELS: Mapping[str, str] = {
    "llama3_8b": "--preset llama3-8b",
    "llama3_70b": "--preset llama3-70b",
    "llama31_405b": "--preset llama3-70b --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 "
    "--num-attention-heads 128",
    "deepseek_v3": "--preset deepseek-v3",
    "kimi_k2": "--preset kimi-k2",
    "gpt_oss_20b": "--preset gpt-oss-20b",
    "gpt_oss_120b": "--preset gpt-oss-120b",
    "qwen3_30b_a3b": "--preset qwen3-30b-a3b",
    "qwen3_235b_a22b": "--preset qwen3-30b-a3b --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 "
    "--num-attention-heads 64 --moe-ffn-hidden-size 1536",
    "nemotron_3_nano": "--preset nemotron-3-nano-30b",
    "nemotron_3_super": "--preset nemotron-3-super-120b",
}
RECIPES: Mapping[str, str] = {
    "fp8_cs": "tensorwise",
    "fp8_row": "tensorwise",
    "fp8_sc": "blockwise",
    "fp8_mx": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Recipes in 8 and 4 bits, by the rows' precision."""
MODULES = ("mla_up_proj", "layernorm", "core_attn")
"""Modules that the recipes recompute, and the planner by the same names. Of the parts of an expert, it
plans the activation alone (`moe_act`), as more reads and writes."""


@dataclass(frozen=True)
class Comparison:
    """A row, and its plan or the reason why there is none."""

    row: Row
    plan: OtherPlan | None = None
    refusal: str = ""

    @property
    def seconds(self) -> float:
        """Return the published seconds of an iteration."""
        row = self.row
        return int(row["gbs"]) * int(row["seq"]) / (float(row["tokens_s_gpu"]) * int(row["gpus"]))

    @property
    def error(self) -> float:
        """Return the error of the planned time."""
        assert self.plan is not None
        return self.plan.time.seconds / self.seconds - 1

    @property
    def kind(self) -> str:
        """Return the kind of run whose errors give its interval."""
        assert self.plan is not None
        return kind_of_run(self.plan.run, self.plan.time)


def program_of(row: Row) -> OtherProgram:
    """Return a row's program."""
    if row["source"].startswith("torchtitan"):
        return PROGRAMS["plain-torch"]
    if row["source"].startswith("NeMo AutoModel"):
        return PROGRAMS["automodel-benchmark"]
    settings = settings_of(row)
    graph = settings.get("cuda_graph", "none")
    scope = [graph, *settings.get("cuda_graph_scope", "").split("+")] if graph != "none" else []
    return MegatronSettings(
        row["gpu"],
        activation=model_named(row["model"]).activation,
        recipe=RECIPES.get(row["precision"]),
        graphs=frozenset(scope),
        sends_tokens_once="dispatcher" in settings,
        recomputes_expert_activation="moe_act" in settings.get("recompute_modules", "").split("+"),
    ).program


def settings_of(row: Row) -> dict[str, str]:
    """Return a row's settings by name; the value of one without a value is empty."""
    return {name: value for name, _, value in (word.partition("=") for word in row["settings"].split())}


@cache
def model_named(name: str) -> ModelConfig:
    """Return a model of the rows, in 16 bits."""
    return read_request([*MODELS[name].split(), "--gpu", "b200", "--world-size", "1"]).config.model


def flags_of(row: Row) -> list[str]:
    """Return the words behind `megalite plan`."""
    settings, model = settings_of(row), model_named(row["model"])
    pp, tp = int(row["pp"] or 1), int(row["tp"] or 1)
    words = f"{MODELS[row['model']]} --bf16 --gpu {row['gpu']}"
    if row["precision"] in RECIPES and row["source"].startswith("torchtitan"):
        words += f" --fp8 --fp8-recipe {RECIPES[row['precision']]}"
    words += f" --world-size {row['gpus']} --seq-length {row['seq']} --micro-batch-size {row['mbs']}"
    words += f" --global-batch-size {row['gbs']} --tp {tp} --pp {pp} --cp {row['cp'] or 1}"
    words += f" --zero-stage {3 if row['fsdp'] not in ('', '0') else 1}"
    if tp > 1:
        words += " --sequence-parallel"
    chunks = int(row["vp"] or 1)
    if pp * chunks > model.num_layers:  # Megatron-LM's first and last chunk may have no layer
        chunks //= 2
    if pp > 1 and chunks > 1:
        words += f" --num-virtual-stages-per-pipeline-rank {chunks}"
    if row["source"].startswith("Megatron") and row["model"] in ("deepseek_v3", "kimi_k2") and pp > 1:
        # As in their recipes' layouts: the last stage has what is left, for it also has the loss.
        stages = pp * chunks
        most = math.ceil(model.num_layers / stages)
        left = model.num_layers - most * (stages - 1)
        if left > 0:
            words += " --pipeline-layers" + f" {most}" * (stages - 1) + f" {left}"
    if model.num_experts:
        words += f" --ep {row['ep'] or 1} --etp 1"
    if row["model"] == "deepseek_v3" and row["source"].startswith("Megatron") and "w/o" not in row["variant"]:
        words += " --mtp-num-layers 1"
    return [*words.split(), *recomputation_of(row, settings)]


def recomputation_of(row: Row, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield the flags of recomputation and offloaded activations."""
    modules = [name for name in settings.get("recompute_modules", "").split("+") if name in MODULES]
    if settings.get("recompute") == "selective_op":
        modules = ["core_attn", "mlp_act", "layernorm"]
    if settings.get("recompute") == "full" or "recompute_layers" in settings:
        yield from ("--recompute-granularity", "full")
    elif modules:
        yield from ("--recompute-granularity", "selective", "--recompute-modules", *modules)
    if "recompute_layers" in settings:
        yield from ("--recompute-method", "block", "--recompute-num-layers", settings["recompute_layers"])


def compare(rows: Sequence[Row]) -> Iterator[Comparison]:
    """Plan each row."""
    for row in rows:
        if row["task"] != "pretrain":
            yield Comparison(row, refusal="fine-tuning")
        elif "gpt-oss-note" in row["notes"]:
            yield Comparison(row, refusal="published as a regression")
        elif row["model"] not in MODELS:
            yield Comparison(row, refusal=f"{row['model']} is not a preset")
        else:
            yield _planned(row)


def _planned(row: Row) -> Comparison:
    try:
        request, plan = request_of(program_of(row), flags_of(row))
        if problems := run_problems(request.config, request.cluster):
            return Comparison(row, refusal=problems[0])
    except UserError as error:
        return Comparison(row, refusal=first_line(error))
    return Comparison(row, plan)


def setting_of(row: Row) -> tuple[str, ...]:
    """Return what the halves do not share."""
    return tuple(row[column] for column in ("source", "task", "gpu", "precision", "model"))


KINDS: Mapping[str, Callable[[Row], str]] = {
    "all": lambda row: "",
    "source": lambda row: row["source"],
    "precision": lambda row: row["precision"],
    "GPU": lambda row: row["gpu"],
    "layers": lambda row: "experts" if model_named(row["model"]).num_experts else "dense",
    "model": lambda row: row["model"],
}


def lines(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line a kind of run, the rows that are in their kind's interval, and the reasons of refusals."""
    planned = [each for each in comparisons if each.plan is not None]
    yield f"{'kind':44}{'rows':>5}{'median':>9}{'|median|':>9}{'in 20%':>8}"
    for kind, value_of in KINDS.items():
        for value in sorted({value_of(each.row) for each in planned}):
            errors = [each.error for each in planned if value_of(each.row) == value]
            sizes = [abs(error) for error in errors]
            within = sum(size < 0.2 for size in sizes) / len(sizes)
            numbers = f"{len(sizes):5}{median(errors):+9.1%}{median(sizes):9.1%}{within:8.0%}"
            yield f"{kind + ' ' + value:44}{numbers}"
    ranges = error_ranges("time")
    for kind in sorted({each.kind for each in planned}):
        least, most, _ = ranges.get(kind, ranges[OTHER])
        found = [each.error for each in planned if each.kind == kind]
        inside = sum(least <= error <= most for error in found)
        times = f"{1 / (1 + most):.2f} to {1 / (1 + least):.2f} times the plan"
        yield f"80% interval, {kind}: {times}, {inside} of {len(found)} rows inside"
    for reason, count in Counter(each.refusal for each in comparisons if each.refusal).most_common():
        yield f"not planned, {count} rows: {reason}"


def row_line(each: Comparison) -> str:
    """Return a row's plan, and what its time is made of."""
    row, plan = each.row, each.plan
    assert plan is not None
    time = plan.time
    name = f"{row['release']} {row['gpus']}x{row['gpu']} {row['precision']} {row['model']}"
    parts = {**time.work._asdict(), "bubble": time.waiting}
    shares = (
        f"{part} {value / time.seconds:.0%}" for part, value in parts.items() if value > time.seconds / 50
    )
    return f"{name:48}{each.seconds:8.2f}{time.seconds:8.2f}{each.error:+8.1%}  {' '.join(shares)}"


def main() -> None:
    """Read the flags and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="print each plan")
    parser.add_argument("--open-blind-half", action="store_true", help="plan the blind half, once")
    args = parser.parse_args()
    comparisons = list(compare(read_rows(BLIND if args.open_blind_half else OPEN)))
    if args.rows:
        print("\n".join(row_line(each) for each in comparisons if each.plan is not None))
    print("\n".join(lines(comparisons)))


if __name__ == "__main__":
    main()
