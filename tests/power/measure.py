"""Inject the errors of the catalogue, verify layouts with each, and write docs/reference/injected_errors.md.

python -m tests.power.measure     run from the repository root; takes some minutes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megalite.config import (
    Config,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megalite.config.parallel import CpCommType
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import RankError
from megalite.distributed.topology import Topology
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout, default_layouts
from megalite.observe.verify.record_run import RunRecord, SaveChain, merge_stages, record_rank
from megalite.observe.verify.verification import FP16_LOSS_SCALE, resumed_excesses
from megalite.train.run_context import Providers
from megalite.utils.errors import UserError
from tests.live_ranks import RANKS, run_ranks
from tests.power.catalogue import CATALOGUE, CONTROL
from tests.power.injected_error import InjectedError
from tests.power.own_stage import CountingStage

NUM_ITERATIONS = 3
GLOBAL_BATCH_SIZE = 8
MODELS = (
    {"gpt": "gpt-tiny", "window": "gpt-tiny", "packed": "gpt-tiny", "llama": "llama-tiny"}
    | {name: f"{name}-tiny" for name in ("bloom", "bert")}
    | dict.fromkeys(("fp16", "buffers", "muon", "sliced"), "gpt-tiny")
    | {"averaged": "gpt-tiny", "edge": "gpt-tiny", "later": "llama-tiny", "mixed": "gpt-tiny"}
    | {"qwen": "llama-tiny", "olmo": "llama-tiny", "neox": "gpt-tiny", "gpt-oss": "llama-tiny"}
    | {"nemotron-h": "nemotron-h-tiny"}
    | {"hybrid": "llama-tiny"}
    | {"experts": "llama-tiny", "biased experts": "llama-tiny", "gated": "llama-tiny"}
    | {"experts beside MLPs": "llama-tiny", "dropping": "llama-tiny"}
    | {"latent": "llama-tiny", "deepseek": "llama-tiny"}
    | {"gemma4": "llama-tiny", "gemma4 e2b": "llama-tiny"}
)
SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (10, 0), "window_attn_skip_freq": (3,)},
    "edge": {"window_size": (9, 0)},  # of two slices of 8 tokens with one between, it has a single key
    "fp16": {"params_dtype": "fp16"},
    "qwen": {
        **{"qk_layernorm": True, "add_qkv_bias": True, "rotary_percent": 0.5},
        **{"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    },
    "olmo": {"norm_position": "output", "qk_layernorm": True, "qk_layernorm_width": "all_heads"},
    "gpt-oss": {
        **{"softmax_type": "learnable", "attention_output_gate": True, "z_loss_coeff": 0.1},
        **{"rope_scaling": "yarn", "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    },
    "nemotron-h": {"init_method_std": 0.1},
    "hybrid": {
        **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (4,), "linear_key_head_dim": 4},
        **{"linear_value_head_dim": 6, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    },
    "later": {"mtp_num_layers": 2},
    "experts": {
        **{"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_aux_loss_coeff": 0.1},
        **{"moe_z_loss_coeff": 0.1},
    },
    "dropping": {
        **{"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_input_jitter_eps": 0.3},
        "moe_expert_capacity_factor": 0.8,
    },
    "biased experts": {
        **{"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "add_bias_linear": True},
    },
    "experts beside MLPs": {
        **{"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_beside_mlp": True},
        "norm_position": "sandwich",
    },
    "gated": {
        **{"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20},
        **{"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    },
    "latent": {
        **{"multi_latent_attention": True, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 6},
        **{"qk_pos_emb_head_dim": 4, "v_head_dim": 5, "num_query_groups": None, "qk_layernorm": True},
    },
    "deepseek": {
        **{"num_experts": 8, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        **{"moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16},
        **{"moe_router_bias_update_rate": 0.05, "moe_latent_size": 12},
    },
    "gemma4": {
        **{"window_size": (10, 0), "window_attn_skip_freq": (1, 0, 1, 1), "num_kv_shared_layers": 1},
        **{"full_attention_kv_channels": 12, "full_attention_query_groups": 1, "qk_layernorm": True},
        **{"keys_as_values": "full_attention", "value_layernorm": True, "layer_output_scale": True},
        **{"rope_scaling": "proportional", "window_rope_scaling": False, "window_rotary_base": 100.0},
        "proportional_rotary_share": 0.5,
    },
    "gemma4 e2b": {
        **{"hidden_size_per_layer_input": 6, "activation": "geglu", "norm_position": "sandwich"},
    },
    "neox": {"parallel_residual": True, "position_embedding_type": "rope", "ffn_hidden_size": 160},
}
PROVIDERS = {"buffers": Providers(CountingStage)}
DROPOUT = {"gpt": 0.1, "packed": 0.1, "bert": 0.1}
COMM_TYPES: dict[str, tuple[CpCommType, ...]] = {"mixed": ("p2p", "a2a", "p2p", "p2p")}
"""The communication type of each layer."""
WITH_DOCUMENTS = ("packed", "hybrid", "nemotron-h", "later")
PACKED = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
BY_NAME = {error.name: error for error in (*CATALOGUE, CONTROL)}


def default_names(model: str) -> tuple[str, ...]:
    """Return the names of a model's default layouts."""
    return tuple(map(str, default_layouts(config_of(model))))


@cache
def config_of(model: str) -> Config:
    """Return the config of a small model."""
    dropout, is_sliced = DROPOUT.get(model, 0.0), model == "sliced"
    return Config(
        model=replace(
            PRESETS[MODELS[model]],
            **{"params_dtype": "fp64", **SETTINGS.get(model, {})},
            hidden_size=32,
            seq_length=32,
            vocab_size=101,
            hidden_dropout=dropout,
            attention_dropout=dropout,
        ),
        optimizer=OptimizerConfig(
            optimizer="muon" if model == "muon" else "adam",
            lr=3e-3,
            lr_decay_style="constant",
            ema_decay=0.9 if model == "averaged" else None,
            loss_scale=FP16_LOSS_SCALE if model == "fp16" else None,
        ),
        recompute=RecomputeConfig(
            recompute_granularity="full" if is_sliced else None, distribute_saved_activations=is_sliced
        ),
        parallel=ParallelConfig(cp_comm_type=COMM_TYPES.get(model, "all_gather")),
        data=DataConfig(mock_data=True, **dict.fromkeys(PACKED if model in WITH_DOCUMENTS else (), True)),
        training=TrainingConfig(
            micro_batch_size=2,
            global_batch_size=GLOBAL_BATCH_SIZE,
            train_iters=NUM_ITERATIONS,
            eval_iters=0,
        ),
    )


def record_with_errors(
    topology: Topology, model: str, config: Config, names: Sequence[str], is_quick: bool = True
) -> list[RunRecord]:
    """Train on this rank once for each error, with the error injected."""
    records = []
    for name in names:
        with BY_NAME[name].injected(topology):
            providers = PROVIDERS.get(model)
            records.append(record_rank(topology, config, NUM_ITERATIONS, providers, is_quick=is_quick))
    return records


def full_differences(error: InjectedError) -> list[str]:
    """Return what a full verification of an error's own layout finds."""
    config, layout = config_of(error.model), Layout.parse(error.layout)
    tolerance = TOLERANCES[config.model.params_dtype]

    def record(config: Config, world_size: int) -> RunRecord:
        arguments = error.model, config, [error.name], False
        ranks = run_ranks(record_with_errors, config.mesh, world_size, *arguments)
        return merge_stages([records[0] for records in ranks])

    with TemporaryDirectory() as folder:
        chain = SaveChain(Path(folder), record)
        reference, _ = chain.run("one rank", config, 1)
        applied = layout.apply(config, GLOBAL_BATCH_SIZE)
        run, resumed = chain.run(error.layout, applied, layout.world_size)
        in_layout = compare(run, reference).excesses(tolerance)
        in_layout += resumed_excesses("one rank", resumed, reference, tolerance)
        return in_layout + resumed_excesses(error.layout, chain.resume(config, 1), reference, tolerance)


def record_runs(model: str, layout: str, names: Sequence[str]) -> list[RunRecord | str]:
    """Run a layout once for each error, all in one process group.

    Returns:
        A record for each error, or the last line of the exception that ends the run.
    """
    parsed = Layout.parse(layout) if layout else Layout()
    config = parsed.apply(config_of(model), GLOBAL_BATCH_SIZE)
    if not names:
        return []
    try:
        ranks = run_ranks(
            record_with_errors,
            config.parallel.mesh,
            parsed.world_size,
            model,
            config,
            names,
            timeout=120.0 + 10.0 * len(names),
        )
    except (RankError, UserError) as error:
        if len(names) == 1:
            return [str(error).strip().splitlines()[-1]]
        return [run for name in names for run in record_runs(model, layout, [name])]
    return [merge_stages(stages) for stages in zip(*ranks, strict=True)]


@dataclass(frozen=True)
class Finding:
    """Says what a layout shows of an error; `differences` is empty if it is the same run."""

    error: str
    layout: str
    differences: list[str]


def measure(errors: Sequence[InjectedError], *, only_own_layout: bool = False) -> Iterator[Finding]:
    """Verify errors in the default layouts of their models, and in their own layouts, until they are found.

    Each run is compared with a run of one rank with the same error. Errors in evaluations, saves and resumes
    are verified in their own layouts only, with evaluations, saves and resumes; the others without.

    Args:
        only_own_layout: omit the default layouts.
    """
    of_saves = [error for error in errors if error.is_of_saves]
    yield from (Finding(error.name, error.layout, full_differences(error)) for error in of_saves)
    errors = [error for error in errors if not error.is_of_saves]
    for model in dict.fromkeys(error.model for error in errors):
        left = {error.name: error for error in errors if error.model == model}
        references = dict(zip(left, record_runs(model, "", [*left]), strict=True))
        defaults = () if only_own_layout else default_names(model)
        own = dict.fromkeys(error.layout for error in left.values())
        first = [layout for layout in own if layout in defaults]  # an error is likely to be found in its own
        rounds = [(layout, True) for layout in first] + [(layout, False) for layout in defaults]
        rounds += [(layout, True) for layout in own if layout not in defaults]
        tried: set[tuple[str, str]] = set()
        for layout, is_own in rounds:
            here = [name for name, error in left.items() if error.layout == layout or not is_own]
            here = [name for name in here if (name, layout) not in tried]
            tried |= {(name, layout) for name in here}
            for name, run in zip(here, record_runs(model, layout, here), strict=True):
                differences = _differences(model, run, references[name])
                if differences:
                    del left[name]
                yield Finding(name, layout, differences)


def _differences(model: str, run: RunRecord | str, reference: RunRecord | str) -> list[str]:
    if isinstance(run, str):
        # The replaced function has changed, and the catalogue has not: the run has not met the error.
        assert not run.startswith(("AttributeError", "NameError", "TypeError")), run
        return [f"the run ends with {run}"]
    assert isinstance(reference, RunRecord), f"the reference of one rank ends with {reference}"
    return compare(run, reference).excesses(TOLERANCES[config_of(model).model.params_dtype])


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "injected_errors.md"
BEGIN, END = "<!-- begin: injected errors -->", "<!-- end: injected errors -->"


def table(findings: Sequence[Finding]) -> str:
    """Return the counts and the table of errors as Markdown."""
    caught: dict[str, dict[str, list[str]]] = {}
    for finding in findings:
        caught.setdefault(finding.error, {})
        if finding.differences:
            caught[finding.error][finding.layout] = finding.differences
    errors = [each for each in BY_NAME.values() if each.name in caught]
    by_default = [each for each in errors if caught[each.name].keys() & set(default_names(each.model))]
    total = [each for each in errors if caught[each.name]]
    lines = [
        f"{len(total)} of {len(errors)} errors are found, {len(by_default)} of them in the default layouts.",
    ]
    for kind in dict.fromkeys(error.kind for error in errors):
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += ["| error | model | found in | first and largest differences |", "|---|---|---|---|"]
        for error in (each for each in errors if each.kind == kind):
            found = caught[error.name]
            layout = next(
                (each for each in (*default_names(error.model), error.layout) if each in found), None
            )
            if layout is None:
                lines.append(f"| {error.name} | {error.model} | not found | {error.unseen} |")
            else:
                lines.append(f"| {error.name} | {error.model} | {layout} | {_shown(found[layout])} |")
    return "\n".join(lines)


def _shown(differences: Sequence[str]) -> str:
    """Return the first difference, and the parameter with the largest difference of the gradient."""
    gradient = [each for each in differences[1:] if each.startswith("gradient of")]
    return "; ".join(each.partition(", over")[0] for each in [differences[0], *gradient])


def write_page(text: str, page: Path = PAGE, begin: str = BEGIN, end: str = END) -> None:
    """Replace the part of the page between two comments."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    from tests.power.locate import write_places

    with RANKS:
        write_page(table([*measure(CATALOGUE)]))
        write_places()
