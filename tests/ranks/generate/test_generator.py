"""Generation on ranks of tp, pp and cp has the logits and the text of one rank."""

import dataclasses

import pytest
import torch

from megalite.attention.cache import CachedCore
from megalite.config import ParallelConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.data.tokenizers.tokenizer import ByteTokenizer
from megalite.distributed.collectives import all_gather_from
from megalite.generate.generator import CompletionWriter, Generator, Prompt, Sampler, Sampling
from megalite.utils.errors import UserError
from tests.live_ranks import run_ranks
from tests.stages import build_stage

TINY = ("gpt-tiny", "bloom-tiny", "llama-tiny", "llama-tiny, recurrent")
RECURRENT = {
    **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (2,), "linear_key_head_dim": 6},
    **{"linear_value_head_dim": 5, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
VOCAB = 257
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=0.9, seed=7), Sampling(top_k=40, top_p=0.8))
PROMPTS = [Prompt(0, [5, 9, 2], 5), Prompt(1, [7], 7), Prompt(4, [44, 3, 250, 17, 8], 3)]


def config_of(preset):
    """The Llama has two key/value heads, which four ranks share."""
    preset, _, is_recurrent = preset.partition(", ")
    return dataclasses.replace(
        PRESETS[preset],
        num_layers=2,
        vocab_size=VOCAB,
        params_dtype="fp64",
        init_method_std=0.3,
        **(RECURRENT if is_recurrent else {}),
    )


def build(topology, preset, attention=CachedCore):
    config = config_of(preset)
    return build_stage(config, topology, range(2), seed=3, attention=attention).eval()


@torch.inference_mode()
def logits_piecewise(topology, preset):
    """Logits of a prompt and of single tokens after it, with padding before the second sequence."""
    stage = build(topology, preset)
    tokens = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))
    stage.core.begin(14, torch.tensor([0, 3]))
    pieces = []
    for piece in tokens.split([9, 1, 1, 3], dim=1):
        numbers, positions = torch.zeros(2, dtype=torch.int64), stage.core.positions(*piece.shape)
        hidden = stage.hidden_states(Microbatch(piece, piece, numbers, positions), None)
        pieces.append(all_gather_from(stage.logits(hidden), topology.tp)[..., :VOCAB])
    return torch.cat(pieces)


def texts(topology, preset):
    """Generate with each kind of sampling, and check one prompt alone."""
    results = {}
    for sampling in SAMPLINGS:
        generator = Generator(build(topology, preset), Sampler(sampling, VOCAB, topology.tp), eod=256)
        made = {}
        for step in generator(PROMPTS, num_samples=2):
            for row, token in step.items():
                made.setdefault(row, []).append(token)
        results[sampling] = made
        alone = [step[0] for step in generator(PROMPTS[1:2])]
        assert alone == made[2], "the text of a prompt depends on the batch"
    return results


LAYERS = {"hidden_size_per_layer_input": 6, "norm_position": "sandwich", "activation": "geglu"}
"""Layers that have embeddings of their own."""
LONG = [
    Prompt(number, torch.randint(256, (length,), generator=torch.Generator().manual_seed(number)).tolist(), 5)
    for number, length in enumerate((23, 1, 12, 16))
]
"""Prompts of which four context-parallel ranks read the longest in slices, together with another or not."""


def steps(topology, changes, sampling, batches, norm_factors=(1.0,)):
    """Steps of generation after batches of prompts, of a model on this rank's stage.

    Args:
        norm_factors: factors of the logits on each context-parallel rank, or on all.
    """
    config = dataclasses.replace(config_of("llama-tiny"), **changes)
    count = config.num_layers // topology.pp.size
    first = topology.pp.rank * count
    stage = build_stage(
        config,
        topology,
        range(first, first + count),
        seed=3,
        cp_comm_type="p2p",
        attention=CachedCore,
    ).eval()
    if stage.is_last:
        with torch.no_grad():
            stage.final_norm.weight.mul_(norm_factors[topology.positions.index % len(norm_factors)])
    generator = Generator(stage, Sampler(sampling, VOCAB, topology.tp), eod=256)
    return [list(generator(prompts, num_samples=num_samples)) for prompts, num_samples in batches]


DIVIDED = {
    "gqa": {},
    "sinks": {"window_size": (5, 0), "window_attn_skip_freq": (2,), "softmax_type": "learnable"},
    "embeddings of layers": LAYERS,
    "recurrent": RECURRENT,
}


def divided_steps(topology):
    batches = [(LONG, 2), (LONG[:1], 1), (LONG[1:2], 3), ([LONG[0], LONG[3]], 1)]
    return {
        (name, sampling): steps(topology, changes, sampling, batches)
        for name, changes in DIVIDED.items()
        for sampling in SAMPLINGS[:2]
    }


def everything(topology):
    return {preset: (logits_piecewise(topology, preset), texts(topology, preset)) for preset in TINY}


def replicas(topology):
    stage = build(topology, "gpt-tiny")
    generator = Generator(stage, Sampler(Sampling(), VOCAB, topology.tp), eod=256)
    writer = CompletionWriter(generator, ByteTokenizer(), topology, batch_size=1)
    completions = list(writer.complete(PROMPTS, num_samples=2))
    with torch.no_grad():
        stage.final_norm.weight[0] = float("nan") if topology.dp.is_last else 1.0
    with pytest.raises(UserError, match="NaN"):
        list(writer.complete(PROMPTS, num_samples=1))
    return completions


def test_stages_pass_the_embeddings_of_layers_on(one_rank):
    mesh = ParallelConfig(pipeline_model_parallel_size=2).mesh
    arguments = LAYERS, SAMPLINGS[0], [(PROMPTS, 1)]
    assert run_ranks(steps, mesh, 2, *arguments) == [steps(one_rank, *arguments)] * 2


@pytest.mark.parametrize(
    ("tp", "pp", "cp"),
    [
        (1, 2, 2),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1, 2), (2, 1, 2), (1, 1, 4))),
    ],
)
def test_context_parallel_ranks_write_the_text_of_one(tp, pp, cp, one_rank):
    expected = divided_steps(one_rank)
    mesh = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        cp_comm_type="p2p",
    ).mesh
    for result in run_ranks(divided_steps, mesh, tp * pp * cp):
        for case, found in expected.items():
            assert result[case] == found, case


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_write_the_text_of_one(tp, one_rank):
    expected = everything(one_rank)
    for result in run_ranks(everything, ParallelConfig(tensor_model_parallel_size=tp).mesh, tp):
        for preset, (logits, made) in expected.items():
            torch.testing.assert_close(result[preset][0], logits, rtol=1e-12, atol=1e-12)
            assert result[preset][1] == made, preset


def test_all_ranks_continue_with_the_token_of_the_first(one_rank):
    """Ranks may round logits in other ways, and the next token that they read must be the same."""
    arguments = {}, SAMPLINGS[0], [(LONG, 1)]
    mesh = ParallelConfig(context_parallel_size=2, cp_comm_type="p2p").mesh
    found = run_ranks(steps, mesh, 2, *arguments, (1.0, -1.0))
    assert found == [steps(one_rank, *arguments)] * 2
    assert steps(one_rank, *arguments, (-1.0,)) != found[0]


def test_replicas_share_prompts(one_rank):
    (expected,) = run_ranks(replicas, ParallelConfig().mesh, 1)
    first, *others = run_ranks(replicas, ParallelConfig(tensor_model_parallel_size=2).mesh, 4)
    assert first == expected
    assert [(each.prompt_number, each.sample) for each in first] == [
        (n, s) for n in (0, 1, 4) for s in (0, 1)
    ]
    assert not any(others)
