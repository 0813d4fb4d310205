"""Runs with a scale for each block of numbers, or from earlier iterations, round alike in every layout.

In fp64, one number that rounds to another code changes the loss by more than 1e-9.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.config.presets import PRESETS
from megalite.config.training import Fp8Recipe
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord
from tests.live_ranks import record_run
from tests.parity.models import NUM_ITERATIONS, config_of, run_alone, run_in

EXPERTS = {
    **{"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_layer_freq": (0, 1, 1, 1)},
    **{"moe_shared_expert_intermediate_size": 64, "mtp_num_layers": 1},
}
LATENT = {
    **{"multi_latent_attention": True, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 32},
    **{"qk_pos_emb_head_dim": 32, "v_head_dim": 32, "num_query_groups": None},
}
MODELS = {"llama": {}, "experts": EXPERTS, "latent": LATENT}


def _config(model: str, recipe: Fp8Recipe, corpus: str) -> Config:
    config = config_of("llama-tiny", "fp64", corpus)
    sizes = {"hidden_size": 64, "kv_channels": 32, "ffn_hidden_size": 256, "seq_length": 128}
    return replace(
        config,
        model=replace(PRESETS["llama-tiny"], **{**vars(config.model), **sizes, **MODELS[model]}),
        training=replace(
            config.training,
            # The range of e5m2 is so large that a scale hardly matters.
            fp8_format="e2m1" if recipe == "nvfp4" else "e4m3",
            fp8_recipe=recipe,
            emulate=True,
            first_last_layers_bf16=model == "latent",
            global_batch_size=4,
        ),
    )


@functools.cache
def _reference(model: str, recipe: Fp8Recipe, corpus: str) -> RunRecord:
    return run_alone(_config(model, recipe, corpus), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("model", "recipe", "name"),
    [
        ("llama", "mxfp8", "tp2mbs1+sp"),
        ("experts", "mxfp8", "dp2ep2"),
        ("latent", "mxfp8", "tp2"),
        ("llama", "blockwise", "pp2zb"),
        ("llama", "nvfp4", "tp2mbs1+sp"),
        ("llama", "mxfp8", "tp2+sp+overlap"),
        ("llama", "nvfp4", "tp2+overlap"),
        ("llama", "nvfp4", "cp2"),
        ("llama", "delayed", "tp2mbs1+sp"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("llama", "mxfp8", "tp4+sp"),
                ("llama", "mxfp8", "tp2pp2zb+sp+overlap"),
                ("llama", "mxfp8", "cp2"),
                ("llama", "nvfp4", "pp2zb"),
                ("llama", "nvfp4", "tp2pp2dp2+zero3+full"),
                ("experts", "nvfp4", "dp2ep2"),
                ("experts", "nvfp4", "tp2+sp"),
                ("latent", "nvfp4", "tp2pp2+sp"),
                ("llama", "mxfp8", "tp2pp2dp2+zero3+full"),
                ("llama", "mxfp8", "cp2+p2p"),
                ("llama", "blockwise", "dp2+zero3"),
                ("experts", "mxfp8", "tp2+sp"),
                ("experts", "blockwise", "dp2+zero2"),
                ("latent", "mxfp8", "tp2pp2+sp"),
                ("latent", "mxfp8", "cp2"),
                ("llama", "delayed", "cp2"),
                ("llama", "delayed", "tp2pp2dp2+zero3+full"),
                ("experts", "delayed", "dp2ep2"),
            )
        ),
    ],
)
def test_same_codes(model: str, recipe: Fp8Recipe, name: str, corpus: str) -> None:
    run = run_in(name, _config(model, recipe, corpus), NUM_ITERATIONS)
    assert not compare(run, _reference(model, recipe, corpus)).excesses(TOLERANCES["fp64"])
    wide = _reference_without_fp8(model, corpus)
    assert abs(run.losses[-1] / wide.losses[-1] - 1.0) > 1e-6  # they are rounded


@functools.cache
def _reference_without_fp8(model: str, corpus: str) -> RunRecord:
    config = _config(model, "mxfp8", corpus)
    training = replace(config.training, fp8_format=None, fp8_recipe="tensorwise", emulate=False)
    return run_alone(replace(config, training=training), NUM_ITERATIONS)


@functools.cache
def _on_one_rank(recipe: Fp8Recipe, corpus: str) -> RunRecord:
    config = Layout.parse("mbs2").apply(_config("llama", recipe, corpus), 4)
    return record_run(config, 1 + NUM_ITERATIONS, 1, is_quick=False)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("tensorwise", "tp2dp2+sp+zero3"),
        ("tensorwise", "tp2dp2+sp+zero1"),
        ("blockwise", "dp2+zero3"),
        ("delayed", "tp2dp2+sp+zero3"),
        *(
            pytest.param("tensorwise", name, marks=pytest.mark.slow)
            for name in (
                *("pp2zbdp2+zero3", "dp2+zero3+kept", "dp2+zero3+offload", "dp2+zero3+full"),
                *("pp2zbdp2+zero2", "dp2+zero1+gather", "dp2+zero2+full"),
            )
        ),
        *(
            pytest.param("blockwise", name, marks=pytest.mark.slow)
            for name in ("pp2zbdp2+zero2", "dp2+zero1+gather", "dp2+zero3+offload+full")
        ),
        *(
            pytest.param("delayed", name, marks=pytest.mark.slow)
            for name in ("pp2zbdp2+zero3", "tp2dp2+sp+zero1", "dp2+zero2+full", "dp2+zero3+kept")
        ),
    ],
)
def test_weights_gathered_in_8_bits_have_the_same_codes(recipe: Fp8Recipe, name: str, corpus: str) -> None:
    """Test them in training and in an evaluation, against weights that each rank rounds itself."""
    layout, config = Layout.parse(name), _config("llama", recipe, corpus)
    gathered, rounded = (
        record_run(
            layout.apply(replace(config, training=replace(config.training, fp8_param_gather=gathers)), 4),
            *(1 + NUM_ITERATIONS, layout.world_size),  # a delayed scale follows from the second one
            is_quick=False,
        )
        for gathers in (True, False)
    )
    assert gathered.losses == rounded.losses
    assert all(gathered.gradients[each].equal(rounded.gradients[each]) for each in rounded.gradients)
    for reference in (rounded, _on_one_rank(recipe, corpus)):
        assert not compare(gathered, reference).excesses(TOLERANCES["fp64"])
