"""Which tokens are drawn, and how often."""

import pytest
import torch

from megalite.generate.generator import Sampler, Sampling
from megalite.utils.errors import UserError

VOCAB = 6
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 9.0, 9.0])  # the last two are padding
NUM_DRAWS = 20_000


def draws(topology, sampling, position=0):
    sampler = Sampler(sampling, VOCAB, topology.tp)
    return sampler(LOGITS.expand(NUM_DRAWS, -1), torch.arange(NUM_DRAWS), position)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_the_softmax(temperature, one_rank):
    counts = draws(one_rank, Sampling(temperature)).bincount(minlength=len(LOGITS))
    expected = (LOGITS[:VOCAB] / temperature).softmax(0)
    assert counts[VOCAB:].sum() == 0
    assert (counts[:VOCAB] / NUM_DRAWS - expected).abs().max() < 4 * (0.25 / NUM_DRAWS) ** 0.5


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), [0]),
        (Sampling(top_k=3), [0, 4, 1]),
        (Sampling(top_k=50), [0, 4, 1, 2, 3, 5]),
        (Sampling(top_p=0.01), [0]),
        (Sampling(top_p=0.5), [0, 4]),  # probabilities .462 .280 .170 .062 .023 .003
        (Sampling(top_p=0.75), [0, 4, 1]),
        (Sampling(top_k=3, top_p=0.5), [0]),  # of three .507 .307 .186
        (Sampling(temperature=0.0), [0]),
    ],
    ids=str,
)
def test_candidates(sampling, kept, one_rank):
    counts = draws(one_rank, sampling).bincount(minlength=len(LOGITS))
    expected = LOGITS[kept].softmax(0)
    assert set(counts.nonzero().flatten().tolist()) == set(kept)
    assert (counts[kept] / NUM_DRAWS - expected).abs().max() < 4 * (0.25 / NUM_DRAWS) ** 0.5


def test_a_draw_is_its_sequences_own(one_rank):
    sampler = Sampler(Sampling(), VOCAB, one_rank.tp)
    numbers = torch.arange(500)
    together = sampler(LOGITS.expand(500, -1), numbers, position=3)
    alone = torch.cat([sampler(LOGITS[None], numbers[i, None], position=3) for i in range(20)])
    assert torch.equal(together[:20], alone)
    assert not torch.equal(together, sampler(LOGITS.expand(500, -1), numbers, position=4))
    assert not torch.equal(together, sampler(LOGITS.expand(500, -1), numbers + 500, position=3))
    other = Sampler(Sampling(seed=1), VOCAB, one_rank.tp)
    assert not torch.equal(together, other(LOGITS.expand(500, -1), numbers, position=3))


def test_candidates_do_not_change_the_noise(one_rank):
    """A token that stays a candidate keeps its noise: where it was drawn from all, it is from fewer."""
    whole, few = draws(one_rank, Sampling()), draws(one_rank, Sampling(top_k=3))
    still = torch.isin(whole, torch.tensor([0, 4, 1]))
    assert torch.equal(whole[still], few[still])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_token(bad, one_rank):
    sampler = Sampler(Sampling(), VOCAB, one_rank.tp)
    logits = LOGITS.clone()
    logits[2] = bad
    rows = torch.stack((LOGITS, logits))
    ids = sampler(rows, torch.zeros(2, dtype=torch.int64), 0).tolist()
    assert ids[0] >= 0 and ids[1] == -1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_k": -3}, "--top-k -3"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"temperature": 0.0, "top_p": 0.9}, "--temperature 0"),
    ],
)
def test_values_out_of_range_are_refused(options, named):
    with pytest.raises(UserError, match=named):
        Sampling(**options)
