"""Tensor-parallel ranks keep the same keys and values between them, and write the same text, as one rank."""

import dataclasses

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.data.tokenizer import ByteTokenizer
from megalite.errors import UserError
from megalite.generation.completions import Writer
from megalite.generation.generator import Generator, Prompt
from megalite.generation.sampling import Sampler, Sampling
from megalite.local_ranks import run_ranks
from megalite.model.cache import CachedCore
from megalite.model.documents import Documents
from megalite.model.stage import GPTStage
from megalite.parallel.collectives import gather_from
from megalite.presets import PRESETS

TINY = ("gpt-tiny", "bloom-tiny", "llama-tiny")
VOCAB = 257
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=0.9, seed=7), Sampling(top_k=40, top_p=0.8))
PROMPTS = [Prompt(0, [5, 9, 2], 9), Prompt(1, [7], 12), Prompt(4, [44, 3, 250, 17, 8], 4)]


def config_of(preset):
    """Of the Llama two key/value heads, which four ranks share."""
    return dataclasses.replace(
        PRESETS[preset], num_layers=2, vocab_size=VOCAB, params_dtype="fp64", init_method_std=0.3
    )


def build(topology, preset, attention=CachedCore):
    config = config_of(preset)
    return GPTStage(config, topology, range(2), seed=3, attention=attention).eval()


@torch.inference_mode()
def logits_piecewise(topology, preset):
    """All logits, of a prompt and of single tokens after it, with padding before the second sequence."""
    stage = build(topology, preset)
    tokens = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))
    stage.core.begin(14, torch.tensor([0, 3]))
    pieces = []
    for piece in tokens.split([9, 1, 1, 3], dim=1):
        documents = Documents(position_ids=stage.core.positions(*piece.shape))
        hidden = stage.hidden_states(piece, torch.zeros(2, dtype=torch.int64), None, documents)
        pieces.append(gather_from(stage.logits(hidden), topology.tp)[..., :VOCAB])
    return torch.cat(pieces)


def texts(topology, preset):
    """What each way of sampling writes, and each prompt alone."""
    results = {}
    for sampling in SAMPLINGS:
        generator = Generator(build(topology, preset), Sampler(sampling, VOCAB, topology.tp), eod=256)
        made = {}
        for step in generator(PROMPTS, num_samples=2):
            for row, token in step.items():
                made.setdefault(row, []).append(token)
        results[sampling] = made
        alone = [step[0] for step in generator(PROMPTS[1:2])]
        assert alone == made[2], "a text is its prompt's own, in any batch"
    return results


def everything(topology):
    return {preset: (logits_piecewise(topology, preset), texts(topology, preset)) for preset in TINY}


def replicas(topology):
    stage = build(topology, "gpt-tiny")
    generator = Generator(stage, Sampler(Sampling(), VOCAB, topology.tp), eod=256)
    writer = Writer(generator, ByteTokenizer(), topology, batch_size=1)
    completions = list(writer.complete(PROMPTS, num_samples=2))
    with torch.no_grad():
        stage.final_norm.weight[0] = float("nan") if topology.dp.is_last else 1.0
    with pytest.raises(UserError, match="NaN"):
        list(writer.complete(PROMPTS, num_samples=1))
    return completions


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_write_the_text_of_one(tp, one_rank):
    expected = everything(one_rank)
    for result in run_ranks(everything, ParallelConfig(tensor_model_parallel_size=tp), tp):
        for preset, (logits, made) in expected.items():
            torch.testing.assert_close(result[preset][0], logits, rtol=1e-12, atol=1e-12)
            assert result[preset][1] == made, preset


def test_replicas_share_prompts(one_rank):
    (expected,) = run_ranks(replicas, ParallelConfig(), 1)
    first, *others = run_ranks(replicas, ParallelConfig(tensor_model_parallel_size=2), 4)
    assert first == expected
    assert [(each.prompt_number, each.sample) for each in first] == [
        (n, s) for n in (0, 1, 4) for s in (0, 1)
    ]
    assert not any(others)
