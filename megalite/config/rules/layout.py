"""Rules between the model and the axes it is spread over."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.model import vocab_padding_problems
from megalite.config.problem import Problem

_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_DP = "data_parallel_size"


def tensor_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Every tp rank holds as many query heads, MLP columns and vocabulary rows as the next."""
    model, tp = config.model, config.parallel.tp
    if model.num_attention_heads % tp:
        yield Problem(
            ("num_attention_heads", _TP),
            f"--num-attention-heads {model.num_attention_heads} is not divisible by --tp {tp}: "
            "each rank takes whole heads",
        )
    if model.ffn_size % tp:
        yield Problem(
            ("ffn_hidden_size", "hidden_size", "activation", _TP),
            f"--ffn-hidden-size {model.ffn_size} is not divisible by --tp {tp}: "
            f"give one that is, such as {-(-model.ffn_size // tp) * tp}",
        )
    for text in vocab_padding_problems(model, tp):
        yield Problem(("pad_vocab_size_to", "vocab_size", _TP), text)


def grouped_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Key/value heads are shared out among tp ranks, or each of them among several tp ranks."""
    model, tp, groups = config.model, config.parallel.tp, config.model.num_kv_heads
    if model.num_attention_heads % tp or model.num_attention_heads % groups:
        return  # said by the rules of those
    names = ("num_attention_heads", "num_query_groups", "kv_channels", "hidden_size", _TP)
    given = f"--num-query-groups {groups} with --tp {tp}"
    if groups % tp and tp % groups:
        yield Problem(names, f"{given}: one must be divisible by the other, change one of them")
    elif tp > groups:
        # Query heads of a group divide among its ranks, since all of them divide among tp.
        ranks, rows = tp // groups, (model.num_attention_heads // groups + 2) * model.head_dim
        if rows % ranks:
            yield Problem(
                names,
                f"{given}: the {rows} rows of a group's query, key and value weight do not divide among "
                f"{ranks} ranks: use a smaller --tp, or more groups",
            )


def sequence_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Every tp rank holds as many positions of a sample as the next."""
    tp, seq_length = config.parallel.tp, config.model.seq_length
    if config.parallel.sequence_parallel and seq_length % tp:
        yield Problem(
            ("sequence_parallel", "seq_length", _TP),
            f"--sequence-parallel with --seq-length {seq_length}, which is not divisible by --tp {tp}: "
            f"give a length that is, such as {-(-seq_length // tp) * tp}, or another --tp",
        )


def world(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The ranks that were started are tp x pp x dp."""
    tp, pp, dp = config.parallel.tp, config.parallel.pp, config.parallel.data_parallel_size
    if world_size is None:
        return
    nearest = -(-world_size // (tp * pp)) * tp * pp
    if dp is not None and tp * pp * dp != world_size:
        yield Problem(
            (_TP, _PP, _DP),
            f"world size {world_size} is not --tp {tp} x --pp {pp} x --dp {dp} = {tp * pp * dp}: "
            f"start {tp * pp * dp} ranks (torchrun --nproc-per-node), or change one of them",
        )
    elif dp is None and world_size % (tp * pp):
        yield Problem(
            (_TP, _PP),
            f"world size {world_size} is not a multiple of --tp {tp} x --pp {pp} = {tp * pp}: "
            f"start {nearest} ranks (torchrun --nproc-per-node), or change one of them",
        )


def replicas(config: Config, world_size: int | None) -> int | None:
    """Data-parallel size as far as it is known: as given, or what tp and pp leave of the world."""
    dp, ranks = config.parallel.data_parallel_size, config.parallel.tp * config.parallel.pp
    if dp is not None or world_size is None or world_size % ranks:
        return dp
    return world_size // ranks


def batch(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A global batch is the same whole number of microbatches on every replica."""
    micro, given = config.training.micro_batch_size, config.training.global_batch_size
    dp = replicas(config, world_size)
    samples = micro * (dp or 1)  # of one microbatch on every replica
    if given is None or given % samples == 0:
        return
    divisor = f"--micro-batch-size {micro}"
    if dp is not None:
        divisor += f" x data-parallel size {dp} = {samples}"
    yield Problem(
        ("global_batch_size", "micro_batch_size", *((_TP, _PP, _DP) if dp is not None else ())),
        f"--global-batch-size {given} is not divisible by {divisor}: "
        f"give {-(-given // samples) * samples}, or change one of them",
    )
