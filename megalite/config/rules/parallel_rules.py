"""Rules for the layout: tensor and pipeline parallelism, and recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from megalite.config.config import (
    Config,
    even_partition,
    layers_per_rank_with_ends,
    layers_per_stage,
    num_chunks,
    num_stages,
)
from megalite.config.model.model_config import round_up
from megalite.config.option import flag_of, flag_with_value, format_value
from megalite.config.parallel import ParallelConfig
from megalite.config.rules import not_divisible
from megalite.config.training import schedule_steps
from megalite.distributed.axes import CONTEXT
from megalite.pipeline.schedules import SCHEDULES
from megalite.utils.errors import Problem, counted

_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_DP = "data_parallel_size"


def tensor_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that tp divides heads, widths and the vocabulary's rows, and that etp divides experts' width."""
    model, parallel = config.model, config.parallel
    tp = parallel.tp
    heads = [
        ("num_attention_heads", model.num_attention_heads, "heads"),
        *((spec.cut_by, spec.num_parts, spec.part) for spec in model.recurrences),
    ]
    for name, number, what in heads:
        fix = f"pass --tp {{divisors}}; each rank takes whole {what}"
        yield from not_divisible(name, number, "--tp", tp, fix, (_TP,))
    experts = model.has_experts
    widths = [
        *((name, width, "--tp", tp) for name, width in model.mlp_widths.items()),
        (
            "moe_shared_expert_intermediate_size",
            (model.moe_shared_expert_intermediate_size or 0) * experts,
            "--tp",
            tp,
        ),
        (
            "moe_ffn_hidden_size",
            model.expert_ffn_size * experts,
            "--etp" if parallel.expert_tensor_parallel_size else "--tp",
            parallel.etp,
        ),
    ]
    fields = ("hidden_size", "activation", "num_experts", _TP, "expert_tensor_parallel_size")
    for name, width, flag, ranks in widths:
        fix = "use a multiple of it, such as {multiple}"
        yield from not_divisible(name, width, flag, ranks, fix, fields)
    fix = "pass --pad-vocab-size-to {multiple}"
    yield from not_divisible("pad_vocab_size_to", model.pad_vocab_size_to or 0, "--tp", tp, fix, (_TP,))


def sequence_divisor(config: Config) -> int:
    """Return the number that must divide the length of each sequence."""
    parallel = config.parallel
    if not parallel.mesh.is_zigzag:
        return parallel.num_hidden_slices
    return math.lcm(parallel.num_hidden_slices, 2 * parallel.mesh.num_position_slices)


def sequence(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the axes that cut hidden states along the sequence divide its length."""
    parallel, seq_length = config.parallel, config.model.seq_length
    num_slices, is_cut_by_tp = sequence_divisor(config), parallel.sequence_parallel
    if seq_length % num_slices == 0:
        return
    mesh, length = parallel.mesh, f"--seq-length {seq_length}"
    if is_cut_by_tp:
        length = f"--sequence-parallel with {length}, which"
    large = [axis for axis in mesh.model.axes if (mesh.sizes[axis.name] or 1) > 1]
    cutting = [a for a in large if "positions" in a.roles or (a.name == "tp" and is_cut_by_tp)]
    sizes = " x ".join(f"{axis.flag} {mesh.sizes[axis.name] or 1}" for axis in cutting)
    yield Problem(
        ("sequence_parallel", "seq_length", *(axis.field for axis in cutting)),
        f"{length} is not divisible by {sizes}{parallel.zigzag_text}: use a multiple of it, such as "
        f"{round_up(seq_length, num_slices)}, or another {cutting[-1].flag}",
    )


def world(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the number of ranks is the product of the axes' sizes."""
    if world_size is None:
        return
    mesh = config.parallel.mesh
    for mesh_spec in mesh.table:
        if mesh_spec is CONTEXT:  # it divides an axis of the model's
            continue
        axes = [
            axis
            for axis in mesh_spec.by_flag
            if axis.is_named(mesh.sizes.get(axis.name) or 1)
            and (mesh.sizes.get(axis.name) or not axis.takes_rest)
        ]
        sizes = [mesh.sizes.get(axis.name) or 1 for axis in axes]
        product = math.prod(sizes)
        text = " x ".join(f"{axis.flag} {size}" for axis, size in zip(axes, sizes, strict=True))
        is_whole = all(mesh.sizes.get(axis.name) for axis in mesh_spec.axes if axis.takes_rest)
        if world_size != product if is_whole else world_size % product:
            start = product if is_whole else round_up(world_size, product)
            yield Problem(
                tuple(axis.field for axis in axes if axis.field),
                f"world size {world_size} is not {'' if is_whole else 'a multiple of '}{text} = {product}: "
                f"start {start} ranks (torchrun --nproc-per-node), or change one of them",
            )


def sample_ranks(config: Config, world_size: int | None) -> int | None:
    """Return the number of ranks that read different samples; None if it is not known."""
    return config.parallel.mesh.num_ranks("samples", world_size)


def replicas(config: Config, world_size: int | None) -> int | None:
    """Return the number of ranks that hold the same parameters; None if it is not known."""
    return config.parallel.mesh.num_ranks("replicas", world_size)


def batch(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the global batch is a whole number of microbatches, the same on every replica."""
    global_batch = config.training.global_batch_size
    if global_batch is not None:
        sizes = {f"--global-batch-size {global_batch}": global_batch}
        yield from whole_microbatches(config, world_size, ("global_batch_size", _TP, _PP), sizes)


def whole_microbatches(
    config: Config, world_size: int | None, fields: tuple[str, ...], sizes: Mapping[str, int]
) -> Iterator[Problem]:
    """Check that each batch size can be split into the same whole number of microbatches on every replica.

    Args:
        fields: fields that determine the sizes.
        sizes: batch sizes, and increments of them, by description.
    """
    micro, dp = config.training.micro_batch_size, sample_ranks(config, world_size)
    samples, divisor = micro * (dp or 1), f"--micro-batch-size {micro}"
    if dp is not None:
        divisor += f" x data-parallel size {dp} = {samples}"
    for what, number in sizes.items():
        if number % samples:
            fix = f"use {round_up(number, samples)}, or change one of them"
            yield Problem((*fields, "micro_batch_size", _DP), f"{what} is not divisible by {divisor}: {fix}")


_DEGREE, _INSTANCES = "data_parallel_shard_degree", "num_distributed_optimizer_instances"


def shard_groups(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that ZeRO shards over groups of equal size, and that there is something to shard."""
    parallel, num_replicas = config.parallel, replicas(config, world_size)
    degree, instances = parallel.data_parallel_shard_degree, parallel.num_distributed_optimizer_instances
    flags = [_flag(parallel, name) for name in (_DEGREE, _INSTANCES) if getattr(parallel, name) is not None]
    requested = " and ".join(flags)
    if parallel.zero_stage == 0:
        if degree is not None or instances not in (None, 1):  # one instance is Megatron-LM's default
            yield Problem(
                (_DEGREE, _INSTANCES, "zero_stage"),
                f"{requested} with --zero-stage 0, which shards nothing: pass --zero-stage 1, 2 or 3 too, or "
                "remove it",
            )
        return
    if config.dry_run.dry_run and parallel.mesh.shards_within_node:
        yield Problem(
            (_DEGREE, "dry_run"),
            f"{requested} (--shard-within-node) with --dry-run, which has no nodes: pass "
            "--data-parallel-shard-degree N, the number of replicas on a node",
        )
    if len(flags) == 2 and (
        degree == 0 or (num_replicas is not None and num_replicas % (instances or 1) == 0)
    ):
        if degree == 0 or degree != (num_replicas or 0) // (instances or 1):
            yield Problem(
                (_DEGREE, _INSTANCES, _DP, _TP, _PP),
                f"{requested} contradict each other"
                f"{f' with {num_replicas} replicas' if num_replicas is not None else ''}: remove one of them",
            )
        return
    for name, number in ((_DEGREE, degree), (_INSTANCES, instances)):
        if num_replicas is not None and number and num_replicas % number:
            yield Problem(
                (name, _DP, _TP, _PP),
                f"{_flag(parallel, name)} does not divide the number of replicas {num_replicas}: pass "
                f"{max(n for n in range(1, min(number, num_replicas) + 1) if num_replicas % n == 0)}, or "
                "another divisor of it",
            )


_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_CHUNK_LAYERS = "num_layers_per_virtual_pipeline_stage"
_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
_METHOD = "pp_partition_method"
_SHAPE = (_PP, "pipeline_schedule", _CHUNKS, _CHUNK_LAYERS)
"""Fields that determine the number of stages."""


def _flag(parallel: ParallelConfig, name: str) -> str:
    """Return a field of `parallel` as its flag and value."""
    return flag_with_value(name, getattr(parallel, name))


def chunks(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that chunks are requested once, with a schedule that has them, on more than one rank."""
    parallel, layers = config.parallel, config.model.num_layers
    each = parallel.num_layers_per_virtual_pipeline_stage
    passed = [name for name in (_CHUNKS, _CHUNK_LAYERS) if getattr(parallel, name) is not None]
    requested = " and ".join(_flag(parallel, name) for name in passed)
    if len(passed) == 2:
        yield Problem((_CHUNKS, _CHUNK_LAYERS), f"{requested} set the same thing: pass one of them")
        return
    if parallel.pp == 1:
        if passed and parallel.num_virtual_stages_per_pipeline_rank != 1:
            yield Problem(
                (*passed, _PP), f"{requested} with --pp 1: one rank has no pipeline, remove it or raise --pp"
            )
        return
    fixed = SCHEDULES[parallel.schedule].num_chunks
    if fixed is not None:
        if passed and parallel.num_virtual_stages_per_pipeline_rank != fixed:
            yield Problem(
                (*passed, "pipeline_schedule"),
                f"{requested} with --pipeline-schedule {parallel.schedule}, which has {fixed} "
                f"{'chunks' if fixed > 1 else 'chunk'} on each rank: remove it, or use interleaved",
            )
    elif each is not None and layers % (parallel.pp * each):
        yield Problem(
            (_CHUNK_LAYERS, "num_layers", _PP),
            f"{requested} x --pp {parallel.pp} does not divide --num-layers {layers}: chunks hold the same "
            "number of layers, change one of them",
        )
    elif num_chunks(config) < 2:
        yield Problem(
            (*_SHAPE, "num_layers", "pipeline_layers"),
            f"--pipeline-schedule {parallel.schedule} with "
            f"{requested or '--pipeline-layers of one chunk per rank'} and --pp {parallel.pp} leaves one "
            "chunk on each rank: it needs two, or use 1f1b",
        )


def split(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that only one option splits the layers, and that its value is valid."""
    parallel = config.parallel
    ways = (("pipeline_layers",), (_FIRST, _LAST), (_EMBEDDING, _LOSS), (_METHOD,))
    passed = [name for names in ways for name in names if getattr(parallel, name) not in (None, False)]
    if sum(bool(set(names) & set(passed)) for names in ways) > 1:
        yield Problem(
            (*passed,),
            f"{' and '.join(_flag(parallel, name) for name in passed)} split the layers in different ways: "
            "pass one of them",
        )
    uneven = [name for name in passed if name in (_FIRST, _LAST, _EMBEDDING, _LOSS)]
    if parallel.num_layers_per_virtual_pipeline_stage is not None and uneven:
        yield Problem(
            (_CHUNK_LAYERS, *uneven),
            f"{_flag(parallel, _CHUNK_LAYERS)} with {_flag(parallel, uneven[0])} makes chunks of different "
            f"sizes: pass {flag_of(_CHUNKS)}",
        )
    if SCHEDULES[parallel.schedule].v_shaped and parallel.has_fixed_ends:
        ends = [name for name in uneven if name in (_FIRST, _LAST)]
        yield Problem(
            ("pipeline_schedule", *ends),
            f"{_flag(parallel, ends[0])} with --pipeline-schedule {parallel.schedule}, whose first rank "
            "holds both ends: pass --pipeline-layers, one number per stage",
        )


def layers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that every stage has a layer, and that stages are equal unless an option splits them."""
    parallel = config.parallel
    if any([*chunks(config, world_size), *split(config, world_size)]):
        return  # the number of stages, or their split of the layers, is not known
    if parallel.pp == 1 and parallel.pipeline_layers is None:
        return
    if parallel.pipeline_layers is not None:
        yield from _listed_stages(config, parallel.pipeline_layers)
    elif parallel.has_fixed_ends:
        yield from _fixed_ends(config)
    elif config.model.num_layers + len(_counted_as_layers(config)) < num_stages(config):
        yield Problem(
            ("num_layers", *_SHAPE),
            f"--num-layers {config.model.num_layers} is fewer than {_stages(config)}: each needs a layer, "
            f"use a smaller --pp{' or fewer chunks' if num_chunks(config) > 1 else ''}",
        )
    elif parallel.pp_partition_method is None:
        yield from _even(config)


def _stages(config: Config) -> str:
    """Name the number of stages by the options that set it."""
    pp, parts = config.parallel.pp, num_chunks(config)
    return f"--pp {pp} stages" if parts == 1 else f"the {pp * parts} stages of --pp {pp} x {parts} chunks"


def _counted_as_layers(config: Config) -> list[str]:
    """Return the options that count something else as a layer."""
    return [name for name in (_EMBEDDING, _LOSS) if getattr(config.parallel, name)]


def _even(config: Config) -> Iterator[Problem]:
    num_layers, stages = config.model.num_layers, num_stages(config)
    extra = _counted_as_layers(config)
    total = num_layers + len(extra)
    if total % stages == 0:
        return
    counted = "".join(f" and {flag_of(name)}" for name in extra)
    remedy = f"replace{counted.removeprefix(' and')} by" if extra else "set the layers of each stage, as in"
    yield Problem(
        ("num_layers", *_SHAPE, *extra, "pipeline_layers"),
        f"--num-layers {num_layers}{counted}{f' (together {total})' if extra else ''} is not divisible by "
        f"{_stages(config).replace(' stages', '', 1) if num_chunks(config) == 1 else _stages(config)}: "
        f"change one of them, or {remedy} "
        f"{flag_with_value('pipeline_layers', even_partition(num_layers, stages))}",
    )


def _listed_stages(config: Config, layers: tuple[int, ...]) -> Iterator[Problem]:
    stages, num_layers = num_stages(config), config.model.num_layers
    flag = _flag(config.parallel, "pipeline_layers")
    if len(layers) != stages:
        yield Problem(
            ("pipeline_layers", *_SHAPE),
            f"{flag} names {len(layers)} stages, but "
            f"{f'--pp is {stages}' if num_chunks(config) == 1 else f'there are {_stages(config)}'}: "
            "pass one number per stage",
        )
    if sum(layers) != num_layers:
        yield Problem(
            ("pipeline_layers", "num_layers"),
            f"{flag} add up to {sum(layers)}, not to --num-layers {num_layers}: change one",
        )


def _fixed_ends(config: Config) -> Iterator[Problem]:
    parallel, num_layers, parts = config.parallel, config.model.num_layers, num_chunks(config)
    ends = [name for name in (_FIRST, _LAST) if getattr(parallel, name) is not None]
    requested = " and ".join(_flag(parallel, name) for name in ends)
    names = (*ends, "num_layers", *_SHAPE)
    by_rank = layers_per_rank_with_ends(config)
    if sum(by_rank) != num_layers or min(by_rank) < 1:
        others, rest = parallel.pp - len(ends), num_layers - sum(getattr(parallel, name) for name in ends)
        yield Problem(
            names,
            f"{requested} of --num-layers {num_layers} leave {rest} layers to the other {others} of --pp "
            f"{parallel.pp} ranks, which must have equal numbers: change one of them",
        )
    elif any(count % parts for count in by_rank):
        yield Problem(
            names,
            f"{requested} make ranks of {format_value(by_rank)} layers, not all divisible by {parts} chunks: "
            "change one of them",
        )


def microbatches(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that there is a microbatch for each rank if the schedule needs one."""
    parallel, training = config.parallel, config.training
    if not SCHEDULES[parallel.schedule].needs_microbatch_per_rank:
        return
    dp = sample_ranks(config, world_size) or 1
    micro, ramp = training.micro_batch_size, training.rampup_batch_size
    smallest = ramp[0] if ramp else training.global_batch_size or micro * dp
    batch_flag = f"--rampup-batch-size from {smallest}" if ramp else f"--global-batch-size {smallest}"
    if steps := schedule_steps(training.step_batch_size_schedule, config.model.seq_length):
        smallest = min(size for _, size in steps)
        batch_flag = f"--step-batch-size-schedule with {smallest}"
    if smallest // (micro * dp) < parallel.pp:
        made = counted(smallest // (micro * dp), "microbatch", "es")
        yield Problem(
            ("global_batch_size", "rampup_batch_size", "micro_batch_size", *_SHAPE, "data_parallel_size"),
            f"{batch_flag} makes {made} of --micro-batch-size {micro} on each of {dp} replicas, but an "
            f"interleaved schedule needs one for each of --pp {parallel.pp} ranks: pass a larger "
            "batch, or use --pipeline-schedule 1f1b without chunks",
        )


def modules(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that no module is recomputed twice."""
    recompute = config.recompute
    if {"mlp", "mlp_act"} <= recompute.modules:
        yield Problem(
            ("recompute_modules",),
            f"{flag_with_value('recompute_modules', recompute.recompute_modules)} names mlp and its part "
            "mlp_act: remove one of them",
        )


def saved_slices(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that saved layer inputs can be cut into equal slices over tp."""
    recompute, tp, seq_length = config.recompute, config.parallel.tp, config.model.seq_length
    num_positions = seq_length // config.parallel.mesh.num_position_slices
    is_cut = recompute.distribute_saved_activations and recompute.recompute_granularity == "full"
    if is_cut and not config.parallel.sequence_parallel and num_positions % tp:
        yield Problem(
            ("distribute_saved_activations", "seq_length", _TP),
            f"--distribute-saved-activations with --seq-length {seq_length}, which is not divisible by "
            f"--tp {tp}: change one of them, or remove --distribute-saved-activations",
        )


def offloaded_layers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that some stage has at least as many layers as each stage should offload."""
    number = config.recompute.cpu_offload_activations
    if number == 0 or any([*split(config, world_size), *layers(config, world_size)]):
        return
    most = max(layers_per_stage(config))
    if number > most:
        stage = f"{_stages(config)} have at most" if num_stages(config) > 1 else "the model has"
        yield Problem(
            ("cpu_offload_activations", "num_layers", *_SHAPE),
            f"--cpu-offload-activations {number} offloads more layers than there are: {stage} {most} layers: "
            f"pass at most --cpu-offload-activations {most}",
        )
