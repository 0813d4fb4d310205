"""Recomputation on 1, 2 and 4 ranks: bitwise the same gradients, and the memory that the papers' table gives.

Korthikanti et al. 2022, table 2, counts the bytes of a layer's saved activations, 2 an element and 1 an
element of a dropout mask: s b h (10 + 24/t + 5 a s / (h t)) with tensor parallelism, and with sequence
parallelism all of it divided by t. Here masks are not stored, and an element has the size of its type. That
leaves, in elements, s b h (4 + 12/t): the norms' inputs and outputs (4), queries, keys, values and context
(4), the activation's input and output (8). The table's 2 a s / (h t), the outputs of softmax and its dropout,
are computed again from one number a query and head, a / (h t).
"""

import itertools

import pytest
import torch

from megalite.config import ModelConfig, ParallelConfig, RecomputeConfig
from megalite.data.microbatch import Microbatch
from megalite.tensor_parallel.gemm import WeightGradientStore, run_stored
from tests.live_bytes import LiveBytes
from tests.live_ranks import run_ranks
from tests.stages import build_stage

S, B, H, HEADS = 32, 2, 64, 4
NUM_LAYERS = 3
MODEL = ModelConfig(
    num_layers=NUM_LAYERS,
    hidden_size=H,
    num_attention_heads=HEADS,
    seq_length=S,
    vocab_size=100,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    params_dtype="fp64",
)
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "attention_dropout": 0.0,
}
QWEN = {**LLAMA, "qk_layernorm": True, "add_qkv_bias": True, "no_rope_freq": (2,)}
QWEN |= {"attention_output_gate": True}
QWEN |= {"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (1, 0, 0)}
QWEN |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5}
QWEN |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "embedding_multiplier": 4.0}
CAPS |= {"softmax_type": "learnable"}
CAPS |= {"window_size": (9, 0), "window_attn_skip_freq": (2,), "window_rotary_base": 100.0}
GEMMA = {**LLAMA, "activation": "geglu", "norm_position": "sandwich", "zero_centered_norms": True, **CAPS}
GEMMA |= {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 1}
NEOX = {"position_embedding_type": "rope", "rotary_percent": 0.5, "parallel_residual": True}
NEOX |= {"qk_layernorm": True, "qk_layernorm_after_rope": True, "residual_multiplier": 0.5}
NEOX |= {"activation": "xielu", "add_norm_bias": False}
SHARED = {
    **{**GEMMA, "norm_position": "pre", "num_kv_shared_layers": 2, "value_layernorm": True},
    **{"keys_as_values": "full_attention", "full_attention_query_groups": 1, "layer_output_scale": True},
    "full_attention_kv_channels": 8,
}
NEMOTRON = {
    **{"hybrid_override_pattern": "M*-", "position_embedding_type": "none", "normalization": "RMSNorm"},
    **{"attention_dropout": 0.0, "mamba_head_dim": 8, "mamba_num_groups": 4, "mamba_state_dim": 5},
}
LATENT = {**LLAMA, "multi_latent_attention": True, "q_lora_rank": 24, "qk_layernorm": True}
LATENT |= {"num_query_groups": None, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4, "v_head_dim": 20}
CHANGES = {"llama": LLAMA, "qwen": QWEN, "neox": NEOX, "gemma": GEMMA, "latent": LATENT}
CHANGES |= {"nemotron": NEMOTRON, "shared": SHARED}
MODELS = {
    "gpt": MODEL,
    **{name: ModelConfig(**{**vars(MODEL), **fields}) for name, fields in CHANGES.items()},
}


def full(**options):
    return RecomputeConfig(recompute_granularity="full", **options)


def selective(*modules):
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)


MODES = {
    "uniform": full(),
    "uniform 2": full(recompute_num_layers=2),
    "block 2": full(recompute_method="block", recompute_num_layers=2),
    "distributed": full(distribute_saved_activations=True),
    "core_attn": selective("core_attn"),
    "mlp": selective("mlp"),
    "mlp_act": selective("mlp_act"),
    "layernorm": selective("layernorm"),
    "all parts": selective("core_attn", "mlp_act", "layernorm"),
    "mlp and norms": selective("mlp", "layernorm"),
}
OF_LATENTS = {
    "mla_up_proj": selective("mla_up_proj"),
    "mla_up_proj and others": selective("mla_up_proj", "core_attn", "mlp", "layernorm"),
}
"""Modes of the model with multi-latent attention alone."""
STORED = ("uniform", "all parts")
"""Modes that are tried with stored weight gradients too."""
WHOLE = (("uniform", True), ("all parts", True), ("mlp and norms", False))
"""Modes that recompute all that a layer can, and whether weight gradients are stored."""
SLACK = 0.02
"""Share of what is kept: the norms' statistics, 4 numbers a token and layer."""


def build(topology, model, num_layers, sequence_parallel, recompute, store=None):
    return build_stage(
        model,
        topology,
        range(num_layers),
        seed=3,
        weight_gradient_store=store,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )


def batch():
    ids = torch.randint(100, (B, S + 1), generator=torch.Generator().manual_seed(1))
    return Microbatch(ids[:, :-1], ids[:, 1:], torch.tensor([7, 2**35]))


def gradients(topology, model, sequence_parallel, recompute, stored=False):
    store = WeightGradientStore()
    stage = build(topology, model, NUM_LAYERS, sequence_parallel, recompute, store if stored else None)
    loss = stage(batch(), None)
    with store.collect() as gradients:
        loss.backward()
    run_stored(gradients)
    return {"loss": loss.detach(), **{name: p.grad for name, p in stage.named_parameters()}}


def live_elements(topology, model, num_layers, sequence_parallel, recompute):
    """Elements that the forward pass of that many layers leaves in memory."""
    stage = build(topology, model, num_layers, sequence_parallel, recompute)
    with torch.no_grad():
        stage(batch(), None)  # tables that are made once
    with LiveBytes() as memory:
        loss = stage(batch(), None)
        kept = memory.settled_count()
        if num_layers == NUM_LAYERS:
            loss.backward()
            del loss
            assert memory.settled_count() == sum(p.grad.nbytes for p in stage.parameters())
    return kept / 8


def switches(tp):
    """What --sequence-parallel can be: it has an effect on several ranks only."""
    return (False, True) if tp > 1 else (False,)


def cases_of(tp):
    """Return whether sequence parallel, model, mode and whether weight gradients are stored, of each case.

    One rank tries each model in the modes that recompute all parts; several ranks try each model, and each
    mode, both with sequence parallelism and without.
    """
    modes = [*((mode, False) for mode in MODES), *((mode, True) for mode in STORED)]
    if tp == 1:
        cases = [(False, name, mode, stored) for name in MODELS for mode, stored in WHOLE]
    else:
        names = list(MODELS)
        cases = [
            (sequence_parallel, names[(number + 4 * sequence_parallel) % len(names)], *mode)
            for sequence_parallel in switches(tp)
            for number, mode in enumerate(modes)
        ]
    of_latents = itertools.product(switches(tp), ["latent"], OF_LATENTS, (False, True))
    return [*cases, *of_latents]


def on_ranks(topology):
    same, kept, expected = {}, {}, {}
    for case in cases_of(topology.tp.size):
        sequence_parallel, name, mode, stored = case
        if case[:2] not in expected:
            expected[case[:2]] = gradients(topology, MODELS[name], sequence_parallel, None)
        recompute = {**MODES, **OF_LATENTS}[mode]
        found = gradients(topology, MODELS[name], sequence_parallel, recompute, stored)
        same[case] = [key for key, gradient in expected[case[:2]].items() if not found[key].equal(gradient)]
    for sequence_parallel in switches(topology.tp.size):
        for mode in ("core_attn", "mla_up_proj"):
            few, many = (
                live_elements(topology, MODELS["latent"], num_layers, sequence_parallel, selective(mode))
                for num_layers in (1, NUM_LAYERS)
            )
            kept[sequence_parallel, "latent", mode] = many - few
        for mode, recompute in [("nothing", None), *MODES.items()]:
            few, many = (
                live_elements(topology, MODEL, num_layers, sequence_parallel, recompute)
                for num_layers in (1, NUM_LAYERS)
            )
            kept[sequence_parallel, mode] = many - few
    return same, kept


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)])
def results(request):
    parallel = ParallelConfig(tensor_model_parallel_size=request.param)
    return run_ranks(on_ranks, parallel.mesh, request.param)


def test_gradients_are_bitwise_the_same(results):
    for same, _ in results:
        assert list(same) == cases_of(len(results))
        assert not {case: names for case, names in same.items() if names}


def layer_elements(t, sequence_parallel, *without):
    """What one layer keeps, by the table."""
    per_token = 1 / t if sequence_parallel else 1
    parts = {
        "residual": 2 * per_token,  # inputs of the norms
        "norms": 2 * per_token,  # inputs of the column-parallel products
        "qkv": 4 / t,  # and the row-parallel product's input
        "core": HEADS / H / t,
        "hidden": 4 / t,
        "activation": 4 / t,
    }
    return S * B * H * sum(size for name, size in parts.items() if name not in without)


def stage_elements(mode, t, sequence_parallel):
    """What the second and later layers of a stage of NUM_LAYERS keep more than a stage of one layer does."""
    cut = t if sequence_parallel or mode == "distributed" else 1
    inputs = S * B * H / cut
    added = NUM_LAYERS - 1
    whole_layer = layer_elements(t, sequence_parallel)
    without = {
        "nothing": (),
        "core_attn": ("core",),
        "mlp_act": ("activation",),
        "layernorm": ("norms",),
        "all parts": ("core", "activation", "norms"),
    }
    if mode in without:
        return added * layer_elements(t, sequence_parallel, *without[mode])
    norm = S * B * H * (1 / t if sequence_parallel else 1)
    if mode == "mlp":
        return added * (layer_elements(t, sequence_parallel, "hidden", "activation") - norm)
    if mode == "mlp and norms":
        return added * layer_elements(t, sequence_parallel, "hidden", "activation", "norms")
    return {
        "uniform": added * inputs,
        "distributed": added * inputs,
        "uniform 2": inputs,  # two groups of layers instead of one
        "block 2": inputs + whole_layer,
    }[mode]


def test_memory_is_the_papers(results):
    t = len(results)
    for (_, kept), (sequence_parallel, mode) in itertools.product(
        results, itertools.product(switches(t), ["nothing", *MODES])
    ):
        expected = stage_elements(mode, t, sequence_parallel)
        assert expected <= kept[sequence_parallel, mode] <= (1 + SLACK) * expected, (sequence_parallel, mode)


def test_latents_are_kept_instead_of_queries_keys_and_values(results):
    t, model = len(results), MODELS["latent"]
    of_head = model.head_dim + model.qk_head_dim + model.v_head_dim  # a query, and the key and the value
    rows = HEADS * of_head / t
    for (_, kept), sequence_parallel in itertools.product(results, switches(t)):
        normed = (model.q_lora_rank + model.kv_lora_rank) * (1 / t if sequence_parallel else 1)
        saved = (
            kept[sequence_parallel, "latent", "core_attn"] - kept[sequence_parallel, "latent", "mla_up_proj"]
        )
        expected = (NUM_LAYERS - 1) * S * B * (rows + normed)
        assert saved == pytest.approx(expected, rel=0.05), sequence_parallel
