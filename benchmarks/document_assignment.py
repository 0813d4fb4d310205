#!/usr/bin/env python
"""Count pairs of queries and keys on the busiest rank, with assigned documents and with slices of the sample.

python benchmarks/document_assignment.py --seq-length 131072 --cp 8

Documents have random lengths, whose logarithms are normally distributed: most are short, and some are many
times as long as the mean. Nothing is timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from megalite.attention.ring import ring_steps, slices_of_ranks
from megalite.data.document_assignment import Assignment, DocumentRun, assign_documents
from megalite.distributed.axis import HeldPositions

MEANS = (500, 2000, 8000, 32000)
_DEVIATION = 1.2  # of the logarithm; its normal distribution's mean is then half of the arithmetic mean


def lengths_of_documents(num_tokens: int, mean: float, seed: int) -> Iterator[int]:
    """Yield lengths of documents that fill a sample of this many tokens."""
    generator, left = random.Random(seed), num_tokens
    while left:
        length = min(left, 1 + int(generator.lognormvariate(0, _DEVIATION) * mean / 2))
        yield length
        left -= length


def slices_of_sample(lengths: Sequence[int], num_ranks: int) -> Assignment:
    """Return two slices of the sample for each rank in zigzag order, as runs of its documents."""
    documents = [range(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]
    slices = (
        HeldPositions(rank, num_ranks, is_zigzag=True).ranges(sum(lengths) // num_ranks)
        for rank in range(num_ranks)
    )
    return Assignment(
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


def relative_pairs(assignment: Assignment) -> float:
    """Return the pairs of the busiest rank, relative to the mean of the ranks."""
    return max(assignment.num_pairs) * len(assignment.ranks) / sum(assignment.num_pairs)


def tokens_sent(assignment: Assignment) -> int:
    """Return for how many tokens ranks send keys and values to other ranks, in forward."""
    return sum(
        len(assignment.ranks[rank][number].positions)
        for rank in range(len(assignment.ranks))
        for step in ring_steps(assignment, rank, None, True)
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
    print("mean length   slices: pairs   sent   assigned: pairs   sent")
    for mean in MEANS:
        cases = [
            list(lengths_of_documents(options.seq_length, mean, seed)) for seed in range(options.samples)
        ]
        found = []
        for cut in (slices_of_sample, assign_documents):
            assignments = [cut(lengths, options.cp) for lengths in cases]
            found.append(statistics.mean(map(relative_pairs, assignments)))
        assigned_sent = statistics.mean(map(tokens_sent, assignments)) / options.seq_length
        pairs, assigned_pairs = found
        print(f"{mean:11}   {pairs:13.2f}   {sent:4.2f}   {assigned_pairs:15.2f}   {assigned_sent:4.2f}")


if __name__ == "__main__":
    main()
