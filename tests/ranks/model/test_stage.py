"""A whole model has one set of weights, masks, losses and gradients, over however many ranks it is spread."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.config import layers_of_stages
from megalite.data.microbatch import Microbatch
from megalite.tensor_parallel.parameter_spec import gather_full, spec_of
from megalite.tensor_parallel.vocab_parallel import sum_tied_embedding_grads
from tests.live_ranks import run_ranks
from tests.stages import build_stage

SEED = 7
NUM_SAMPLES, LENGTH = 3, 12
GPT = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=LENGTH,
    vocab_size=301,  # the last of 4 ranks holds 13 tokens and 83 rows of padding
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.3,
    params_dtype="fp64",
)
BLOOM = {"position_embedding_type": "alibi", "embed_layernorm": True}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_attention_heads": 8,
    "ffn_hidden_size": 20,
}
QWEN = {"qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 6}
NEOX = {"position_embedding_type": "rope", "rotary_percent": 0.5, "parallel_residual": True}
CAPS = {
    **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 5.0},
    **{"embedding_multiplier": 4.0, "logit_multiplier": 0.7},
}
GEMMA = {"activation": "geglu", "norm_position": "sandwich", "zero_centered_norms": True, **QWEN, **CAPS}
OLMO = {"qk_layernorm": True, "qk_layernorm_width": "all_heads"}
LATENT = {
    **{"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_layernorm": True},
    **{"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5},
}
SINKS = {"softmax_type": "learnable", "attention_output_gate": True}
LIMITS = {"activation": "quick_geglu", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0}
HYBRID = {
    **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (2,), "linear_key_head_dim": 3},
    **{"linear_value_head_dim": 5, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
MAMBA = {"mamba_head_dim": 4, "mamba_num_groups": 4, "mamba_state_dim": 3, "mamba_num_heads": 8}
CHANGES = {
    "gpt": {},
    "gpt with dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "bloom": BLOOM,
    # 12 heads: on a rank, ALiBi's slopes are a slice of a list in two parts; 2 ranks of 4 hold padding alone
    "bloom of 12 heads": {
        **BLOOM,
        "num_attention_heads": 12,
        "hidden_size": 48,
        "vocab_size": 130,
        "pad_vocab_size_to": 384,
    },
    "llama": LLAMA,
    "llama, 2 groups": {**LLAMA, "num_query_groups": 2},
    "llama, 1 group": {**LLAMA, "num_query_groups": 1},
    "llama with dropout": {**LLAMA, "num_query_groups": 2, "hidden_dropout": 0.2, "attention_dropout": 0.3},
    # without rotary positions, a bias of all keys has no effect
    "gpt with norms of heads": {"qk_layernorm": True, "position_embedding_type": "rope"},
    "llama with norms of heads": {**LLAMA, **QWEN, "num_query_groups": 2},
    "llama with norms of all heads": {**LLAMA, **OLMO, "num_query_groups": 2},
    "llama with sandwich norms": {**LLAMA, **GEMMA, "num_query_groups": 2},
    "llama with windows": {
        **{**LLAMA, "rope_scaling": "yarn", "original_max_position_embeddings": 4, "window_size": (3, 0)},
        **{"window_attn_skip_freq": (2,), "window_rotary_base": 70.0, "window_rope_scaling": False},
    },
    "llama with sinks": {**LLAMA, **SINKS, **LIMITS, "num_query_groups": 2, "attention_dropout": 0.3},
    "latent attention": {**LLAMA, **LATENT, "rotary_interleaved": True, "attention_dropout": 0.3},
    "latent attention without latent queries": {**LLAMA, **LATENT, "q_lora_rank": None},
    "llama with output norms": {**LLAMA, **OLMO, "norm_position": "output"},
    "llama with a recurrence": {**LLAMA, **HYBRID, "zero_centered_norms": True, "hidden_dropout": 0.2},
    "mamba": {**LLAMA, **MAMBA, "hybrid_override_pattern": "M*-", "activation": "squared_relu"},
    "mamba with dropout": {**MAMBA, "hybrid_override_pattern": "*MM", "hidden_dropout": 0.2},
    "recurrences alone": {**HYBRID, "linear_attention_freq": None, "linear_conv_kernel_dim": 2},
    "neox": {**NEOX, "hidden_dropout": 0.2},
    "llama with layers without rope": {**LLAMA, "no_rope_freq": (2,), "rotary_interleaved": True},
    "mixed": {**LLAMA, "num_query_groups": 2, "add_bias_linear": True, "normalization": "LayerNorm"},
}
"""Models by name."""
ON_FOUR = ["gpt", "bloom of 12 heads", *(name for name in CHANGES if "num_query_groups" in CHANGES[name])]
"""Models for four tensor-parallel ranks: some ranks hold mostly padding, or share their key/value heads."""

LAYOUTS = {"tp4": (4, 1, None), "pp4": (1, 4, (0, 2, 1, 0)), "tp2pp2": (2, 2, (1, 2))}
"""Tensor-parallel size, pipeline-parallel size and layers of each stage."""


def config_of(name):
    return ModelConfig(**{**vars(GPT), **CHANGES[name]})


def batch(config):
    ids = torch.randint(
        config.vocab_size, (NUM_SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    return ids[:, :-1], ids[:, 1:], torch.tensor([5, 2**40, 11])


def packed():
    """Samples of two documents each, whose positions start anew; some tokens have no loss."""
    ends = torch.tensor([5, 1, 9])[:, None]
    places = torch.arange(LENGTH).expand(NUM_SAMPLES, LENGTH)
    second = places > ends
    return {
        "position_ids": torch.where(second, places - ends - 1, places),
        "document_ids": second.long(),
        "loss_mask": places != ends,
    }


def build(topology, config, layers=None, **options):
    counts = layers or [config.num_layers // topology.pp.size] * topology.pp.size
    numbers = layers_of_stages(config.num_layers, counts)[topology.pp.rank]
    return build_stage(config, topology, numbers, seed=SEED, **options)


def sum_partial_gradients(stage, topology):
    """Does what the optimizer does where a rank has the gradient of its positions, or of its heads."""
    for parameter in stage.parameters():
        axis = spec_of(parameter).parameter_axes.partial_axis(topology)
        if axis is not None:
            dist.all_reduce(parameter.grad, group=axis.group)


def gather(stage, topology, gradients=False):
    """Full parameters, or their gradients, by name."""
    return {
        name: gather_full(p.grad if gradients else p.detach(), spec_of(p), topology)
        for name, p in stage.named_parameters()
    }


def shake(stage, topology):
    """Moves every weight, the constants among them, off where it starts; the same in every layout."""
    for name, parameter in stage.named_parameters():
        spec = spec_of(parameter)
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        noise = 0.2 * torch.randn(spec.full_shape, generator=generator, dtype=parameter.dtype)
        parameter.data += spec.box(topology).of(noise)


def loss_and_gradients(topology, cases, sequence_parallel=False):
    """Of each model, packed or not: the loss, the masks' effect in it, and every gradient in full."""
    results = {}
    for name, is_packed in cases:
        config = config_of(name)
        stage = build(topology, config, sequence_parallel=sequence_parallel)
        shake(stage, topology)
        loss = stage(Microbatch(*batch(config), **(packed() if is_packed else {})), None)
        loss.backward()
        sum_partial_gradients(stage, topology)
        results[name, is_packed] = {"loss": loss.detach(), **gather(stage, topology, gradients=True)}
    return results


def initial_weights(topology, cases, layers=None):
    """Of each model and dtype, this stage's part of them in full."""
    results = {}
    for name, dtype in cases:
        config = replace(config_of(name), params_dtype=dtype)
        results[name, dtype] = gather(build(topology, config, layers), topology)
    return results


def tied_gradients(topology, layers):
    """A tied table's gradient before and after the stages have added theirs."""
    stage = build(topology, config_of("gpt"), layers)
    weight = stage.tied_weight
    before = after = None
    if weight is not None and topology.pp.size > 1:
        generator = torch.Generator().manual_seed(topology.rank)
        before = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        after = before.clone()
        sum_tied_embedding_grads(after, topology.pp)
    return topology.pp.rank, topology.tp.rank, before, after


def weights_and_tied_gradients(topology, cases, layers):
    return initial_weights(topology, cases, layers), tied_gradients(topology, layers)


def alternating(names, values, start):
    """Pair each name with one of two values: with the other one, if the other start is given."""
    return [(name, values[(number + start) % 2]) for number, name in enumerate(names)]


@pytest.fixture(scope="module")
def reference():
    cases = list(itertools.product(CHANGES, (False, True)))
    return run_ranks(loss_and_gradients, ParallelConfig().mesh, 1, cases)[0]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"),
    [(2, False), (2, True), (4, True), pytest.param(4, False, marks=pytest.mark.slow)],
)
def test_tensor_parallel_ranks_agree_with_one(tp, sequence_parallel, reference):
    parallel = ParallelConfig(tensor_model_parallel_size=tp)
    cases = alternating(CHANGES if tp == 2 else ON_FOUR, (False, True), sequence_parallel)
    for result in run_ranks(loss_and_gradients, parallel.mesh, tp, cases, sequence_parallel):
        for case in cases:
            assert set(result[case]) == set(reference[case])
            for name, tensor in reference[case].items():
                error = (result[case][name] - tensor).abs().max() / tensor.abs().max()
                assert error <= 1e-12, (case, name, error)


def test_dropout_is_there(reference):
    """What would make the comparison of masks worthless: none at all."""
    losses = {name: result["loss"] for (name, is_packed), result in reference.items() if not is_packed}
    assert losses["gpt with dropout"] != losses["gpt"]
    assert losses["llama with dropout"] != losses["llama, 2 groups"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_the_same_bits(layout, one_rank):
    tp, pp, layers = LAYOUTS[layout]
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    cases = alternating(ON_FOUR if tp == 4 else CHANGES, ("fp32", "fp64"), layout == "pp4")
    results = run_ranks(weights_and_tied_gradients, parallel.mesh, tp * pp, cases, layers)

    for case, expected in initial_weights(one_rank, cases).items():
        seen = set()
        for weights, _ in results:
            seen |= set(weights[case])
            for name, tensor in weights[case].items():
                assert torch.equal(tensor, expected[name]), (case, name)
        assert seen == set(expected)

    check_tied_gradients([tied for _, tied in results], pp)


def check_tied_gradients(results, pp):
    by_place = {(stage, slice_): (before, after) for stage, slice_, before, after in results}
    for (stage, slice_), (before, after) in by_place.items():
        if stage not in (0, pp - 1) or pp == 1:
            assert after is None
        else:
            other, _ = by_place[pp - 1 - stage, slice_]
            assert torch.equal(after, before + other)


@pytest.mark.parametrize("model", ["gpt with dropout", "llama with dropout"])
def test_masks_are_the_samples_own(model, one_rank):
    """Whatever microbatch a sample stands in, and wherever in it."""
    config = config_of(model)
    stage = build(one_rank, config)
    tokens, labels, numbers = batch(config)
    whole = stage(Microbatch(tokens, labels, numbers), None)
    alone = sum(stage(Microbatch(tokens[[i]], labels[[i]], numbers[[i]]), None) for i in (2, 0, 1))
    torch.testing.assert_close(alone, whole, rtol=1e-13, atol=0.0)
    other = Microbatch(tokens, labels, numbers + 1)
    assert stage(other, None) != whole
    assert stage.eval()(Microbatch(tokens, labels, numbers), None) == stage(other, None)
