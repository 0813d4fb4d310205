"""Rules of the pipeline: its chunks, the layers of its stages, and the microbatches that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_of
from megalite.config.parallel import ParallelConfig
from megalite.config.partition import even_partition
from megalite.config.problem import Problem
from megalite.config.rules.layout import replicas
from megalite.config.stages import (
    layers_per_rank_with_ends,
    num_chunks,
    num_stages,
    weights_by_name,
    words,
)

_PP = "pipeline_model_parallel_size"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_CHUNK_LAYERS = "num_layers_per_virtual_pipeline_stage"
_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
_METHOD = "pp_partition_method"
_SHAPE = (_PP, "pipeline_schedule", _CHUNKS, _CHUNK_LAYERS)
"""Fields that make up the number of stages."""


def chunks(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Chunks are asked for once, of a schedule that has them, on more ranks than one."""
    parallel, layers = config.parallel, config.model.num_layers
    each = parallel.num_layers_per_virtual_pipeline_stage
    both = {name: getattr(parallel, name) for name in (_CHUNKS, _CHUNK_LAYERS)}
    given = {name: value for name, value in both.items() if value is not None}
    told = " and ".join(f"{flag_of(name)} {value}" for name, value in given.items())
    if len(given) == 2:
        yield Problem((_CHUNKS, _CHUNK_LAYERS), f"{told} say the same thing twice: give one of them")
        return
    if parallel.pp == 1:
        if given and parallel.num_virtual_stages_per_pipeline_rank != 1:
            yield Problem(
                (*given, _PP), f"{told} with --pp 1: one rank has no pipeline, remove it or raise --pp"
            )
        return
    if given and parallel.schedule in ("gpipe", "zb-h1", "zb-v"):
        yield from _chunks_of_another(parallel, given, told)
    elif each is not None and layers % (parallel.pp * each):
        yield Problem(
            (_CHUNK_LAYERS, "num_layers", _PP),
            f"{told} x --pp {parallel.pp} does not divide --num-layers {layers}: chunks hold the same number "
            f"of layers, change one of them",
        )
    elif parallel.schedule == "interleaved" and num_chunks(config) < 2:
        yield Problem(
            (*_SHAPE, "num_layers", "pipeline_layers"),
            f"--pipeline-schedule interleaved with {told or '--pipeline-layers of one chunk a rank'} and "
            f"--pp {parallel.pp} leaves one chunk on each rank: it needs two, or use 1f1b",
        )


def _chunks_of_another(parallel: ParallelConfig, given: dict[str, int], told: str) -> Iterator[Problem]:
    has = 2 if parallel.schedule == "zb-v" else 1
    if given.get(_CHUNKS) != has:
        yield Problem(
            (*given, "pipeline_schedule"),
            f"{told} with --pipeline-schedule {parallel.schedule}, which has {has} "
            f"{'chunks' if has > 1 else 'chunk'} on each rank: remove it, or use interleaved",
        )


def split(config: Config, world_size: int | None) -> Iterator[Problem]:
    """One option says how the layers are split, and it can be read."""
    parallel = config.parallel
    ways = (("pipeline_layers",), (_FIRST, _LAST), (_EMBEDDING, _LOSS), (_METHOD,))
    given = [name for names in ways for name in names if getattr(parallel, name) not in (None, False)]
    if sum(bool(set(names) & set(given)) for names in ways) > 1:
        yield Problem(
            (*given,),
            f"{' and '.join(_told(parallel, name) for name in given)} split the layers in different ways: "
            "give one of them",
        )
    uneven = [name for name in given if name in (_FIRST, _LAST, _EMBEDDING, _LOSS)]
    if parallel.num_layers_per_virtual_pipeline_stage is not None and uneven:
        yield Problem(
            (_CHUNK_LAYERS, *uneven),
            f"{_told(parallel, _CHUNK_LAYERS)} with {_told(parallel, uneven[0])}: chunks differ then, "
            f"give {flag_of(_CHUNKS)}",
        )
    if parallel.schedule == "zb-v" and parallel.has_given_ends:
        ends = [name for name in uneven if name in (_FIRST, _LAST)]
        yield Problem(
            ("pipeline_schedule", *ends),
            f"{_told(parallel, ends[0])} with --pipeline-schedule zb-v, whose first rank holds both ends: "
            "give --pipeline-layers, a number a stage",
        )
    yield from _method(config)


def _told(parallel: ParallelConfig, name: str) -> str:
    value = getattr(parallel, name)
    if value is True:
        return flag_of(name)
    return f"{flag_of(name)} {words(value) if isinstance(value, tuple) else value}"


def _method(config: Config) -> Iterator[Problem]:
    method = config.parallel.pp_partition_method
    if method is None or method in ("uniform", "parameters"):
        return
    told = f"--pp-partition-method {method}"
    if not method.startswith("type:"):
        yield Problem((_METHOD,), f"{told} is not known: choose uniform, parameters or type:REGEX")
        return
    try:
        _, each, _ = weights_by_name(config.model, method)
    except re.error as error:
        yield Problem((_METHOD,), f"{told} is no regular expression ({error}): write it as type:transformer")
        return
    if not each:
        yield Problem(
            (_METHOD,),
            f"{told} matches no transformer layer, so that there is nothing to balance: "
            "write type:transformer or type:transformer|embedding",
        )


def layers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Every stage has a layer at least, and as many as the next unless told."""
    parallel = config.parallel
    if any([*chunks(config, world_size), *split(config, world_size)]):
        return  # there is no telling how many stages share them in which way
    if parallel.pp == 1 and parallel.pipeline_layers is None:
        return
    if parallel.pipeline_layers is not None:
        yield from _given_stages(config, parallel.pipeline_layers)
    elif parallel.has_given_ends:
        yield from _given_ends(config)
    elif config.model.num_layers + len(_extra(config)) < num_stages(config):
        yield Problem(
            ("num_layers", *_SHAPE),
            f"--num-layers {config.model.num_layers} is fewer than {_stages(config)}: each needs a layer, "
            f"use a smaller --pp{' or fewer chunks' if num_chunks(config) > 1 else ''}",
        )
    elif parallel.pp_partition_method is None:
        yield from _even(config)


def _stages(config: Config) -> str:
    """The number of stages, in the words of the options that make it."""
    pp, parts = config.parallel.pp, num_chunks(config)
    return f"--pp {pp} stages" if parts == 1 else f"the {pp * parts} stages of --pp {pp} x {parts} chunks"


def _extra(config: Config) -> list[str]:
    """Options that make something else than a layer count as one."""
    return [name for name in (_EMBEDDING, _LOSS) if getattr(config.parallel, name)]


def _even(config: Config) -> Iterator[Problem]:
    num_layers, stages = config.model.num_layers, num_stages(config)
    extra = _extra(config)
    total = num_layers + len(extra)
    if total % stages == 0:
        return
    counted = "".join(f" and {flag_of(name)}" for name in extra)
    uneven = words(even_partition(num_layers, stages))
    yield Problem(
        ("num_layers", *_SHAPE, *extra, "pipeline_layers"),
        f"--num-layers {num_layers}{counted}{f' (together {total})' if extra else ''} is not divisible by "
        f"{_stages(config).replace(' stages', '', 1) if num_chunks(config) == 1 else _stages(config)}: "
        f"change one of them, or give each stage's layers, as in --pipeline-layers {uneven}",
    )


def _given_stages(config: Config, given: tuple[int, ...]) -> Iterator[Problem]:
    stages, num_layers = num_stages(config), config.model.num_layers
    if len(given) != stages:
        yield Problem(
            ("pipeline_layers", *_SHAPE),
            f"--pipeline-layers {words(given)} names {len(given)} stages, but "
            f"{f'--pp is {stages}' if num_chunks(config) == 1 else f'there are {_stages(config)}'}: "
            "give one number a stage",
        )
    if sum(given) != num_layers:
        yield Problem(
            ("pipeline_layers", "num_layers"),
            f"--pipeline-layers {words(given)} add up to {sum(given)}, not to --num-layers {num_layers}: "
            "change one",
        )


def _given_ends(config: Config) -> Iterator[Problem]:
    parallel, num_layers, parts = config.parallel, config.model.num_layers, num_chunks(config)
    ends = [name for name in (_FIRST, _LAST) if getattr(parallel, name) is not None]
    told = " and ".join(_told(parallel, name) for name in ends)
    names = (*ends, "num_layers", *_SHAPE)
    by_rank = layers_per_rank_with_ends(config)
    if sum(by_rank) != num_layers or min(by_rank) < 1:
        others, rest = parallel.pp - len(ends), num_layers - sum(getattr(parallel, name) for name in ends)
        yield Problem(
            names,
            f"{told} of --num-layers {num_layers} leave {rest} layers to the other {others} of --pp "
            f"{parallel.pp} ranks, each of which takes the same number: change one of them",
        )
    elif any(count % parts for count in by_rank):
        yield Problem(
            names,
            f"{told} make ranks of {words(by_rank)} layers, which {parts} chunks on each do not divide: "
            "change one of them",
        )


def microbatches(config: Config, world_size: int | None) -> Iterator[Problem]:
    """An interleaved pipeline has a group of microbatches to pass round."""
    parallel, training = config.parallel, config.training
    if parallel.schedule != "interleaved":
        return
    dp = replicas(config, world_size) or 1
    micro, ramp = training.micro_batch_size, training.rampup_batch_size
    smallest = ramp[0] if ramp else training.global_batch_size or micro * dp
    told = f"--rampup-batch-size from {smallest}" if ramp else f"--global-batch-size {smallest}"
    if smallest // (micro * dp) < parallel.pp:
        yield Problem(
            ("global_batch_size", "rampup_batch_size", "micro_batch_size", *_SHAPE, "data_parallel_size"),
            f"{told} makes {smallest // (micro * dp)} microbatches of --micro-batch-size {micro} on each of "
            f"{dp} replicas, but an interleaved schedule needs one for each of --pp {parallel.pp} ranks: "
            "give more, or use --pipeline-schedule 1f1b without chunks",
        )
