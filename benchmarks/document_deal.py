#!/usr/bin/env python
"""Count pairs of queries and keys on the busiest rank, with dealt documents and with slices of the sample.

python benchmarks/document_deal.py --seq-length 131072 --cp 8

Documents have random lengths, whose logarithms are normally distributed: most are short, and some are many
times as long as the mean. Nothing is timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from megalite.distributed.held_positions import HeldPositions
from megalite.document_deal import Deal, DocumentRun, deal_documents
from megalite.model.ring_attention import ring_steps, slices_of_ranks

MEANS = (500, 2000, 8000, 32000)
_DEVIATION = 1.2  # of the logarithm; its normal distribution's mean is then half of the arithmetic mean


def lengths_of_documents(num_tokens: int, mean: float, seed: int) -> Iterator[int]:
    """Yield lengths of documents that fill a sample of this many tokens."""
    generator, left = random.Random(seed), num_tokens
    while left:
        length = min(left, 1 + int(generator.lognormvariate(0, _DEVIATION) * mean / 2))
        yield length
        left -= length


def slices_of_sample(lengths: Sequence[int], num_ranks: int) -> Deal:
    """Return two slices of the sample for each rank in zigzag order, as runs of its documents."""
    documents = [range(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]
    slices = (
        HeldPositions(rank, num_ranks, is_zigzag=True).runs(sum(lengths) // num_ranks)
        for rank in range(num_ranks)
    )
    return Deal(
        tuple(
            tuple(
                DocumentRun(each, range(max(each.start, part.start), min(each.stop, part.stop)))
                for part in parts
                for each in documents
                if max(each.start, part.start) < min(each.stop, part.stop)
            )
            for parts in slices
        )
    )


def relative_pairs(deal: Deal) -> float:
    """Return the pairs of the busiest rank, relative to the mean of the ranks."""
    return max(deal.num_pairs) * len(deal.ranks) / sum(deal.num_pairs)


def tokens_sent(deal: Deal) -> int:
    """Return for how many tokens ranks send keys and values to other ranks, in forward."""
    return sum(
        len(deal.ranks[rank][number].positions)
        for rank in range(len(deal.ranks))
        for step in ring_steps(deal, rank, None, True)
        if step.distance
        for number in step.sent
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each mean length of documents."""
    parser = argparse.ArgumentParser(description="Count pairs on the busiest rank.")
    parser.add_argument("--seq-length", type=int, default=131072)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args(arguments)
    slices = slices_of_ranks(HeldPositions(0, options.cp, is_zigzag=True), options.seq_length)
    sent = tokens_sent(slices) / options.seq_length  # documents do not change it
    print(f"{options.samples} samples of {options.seq_length} tokens on {options.cp} ranks")
    print("pairs: of the busiest rank, relative to the mean; sent: tokens whose keys are sent, per token")
    print("mean length   slices: pairs   sent   dealt: pairs   sent")
    for mean in MEANS:
        cases = [
            list(lengths_of_documents(options.seq_length, mean, seed)) for seed in range(options.samples)
        ]
        found = []
        for cut in (slices_of_sample, deal_documents):
            deals = [cut(lengths, options.cp) for lengths in cases]
            found.append(statistics.mean(map(relative_pairs, deals)))
        dealt_sent = statistics.mean(map(tokens_sent, deals)) / options.seq_length
        pairs, dealt_pairs = found
        print(f"{mean:11}   {pairs:13.2f}   {sent:4.2f}   {dealt_pairs:12.2f}   {dealt_sent:4.2f}")


if __name__ == "__main__":
    main()
