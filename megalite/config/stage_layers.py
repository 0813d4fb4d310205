"""The number of pipeline stages, and the number of layers in each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from megalite.config.config import Config
from megalite.config.model.model_config import ModelConfig, layer_weights, mtp_weights, padded_vocab_size
from megalite.config.parallel import LAYER_CLASS
from megalite.pipeline.schedules import DEFAULT_NUM_CHUNKS, SCHEDULES, StageMap

EMBEDDING_CLASS = "EmbeddingPipe"
HEAD_CLASS = "LMHeadPipe"
"""Megatron-DeepSpeed's class names, which the REGEX of --pp-partition-method is matched against."""


def num_chunks(config: Config) -> int:
    """Return the number of model chunks on each pipeline rank, at least one."""
    parallel = config.parallel
    fixed = SCHEDULES[parallel.schedule].num_chunks
    if fixed is not None:
        return fixed
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return config.model.num_layers // parallel.pp // parallel.num_layers_per_virtual_pipeline_stage or 1
    if parallel.pipeline_layers is not None:
        return len(parallel.pipeline_layers) // parallel.pp or 1
    return DEFAULT_NUM_CHUNKS


def num_stages(config: Config) -> int:
    """Return the number of global stages, over all ranks."""
    return config.parallel.pp * num_chunks(config)


def stage_map(config: Config) -> StageMap:
    """Return the map between global stages and the chunks of the pipeline ranks."""
    return SCHEDULES[config.parallel.schedule].stage_map(config.parallel.pp, num_chunks(config))


def hides_expert_messages(config: Config) -> bool:
    """Return whether pairs of actions run in turns, which change while rows of experts are in flight.

    Offloaded activations follow the order of whole actions.
    """
    is_offloaded = config.recompute.cpu_offload_activations > 0
    overlaps = SCHEDULES[config.parallel.schedule].overlaps
    return overlaps and config.parallel.has_expert_axes and not is_offloaded


def layers_per_stage(config: Config) -> tuple[int, ...]:
    """Return the number of layers of each global stage.

    In a valid config, no number is negative and the numbers sum to the model's layers.
    """
    parallel, layers = config.parallel, config.model.num_layers
    stages = num_stages(config)
    if parallel.pp == 1:
        return (layers,)
    if parallel.pipeline_layers is not None:
        return parallel.pipeline_layers
    if parallel.pp_partition_method is not None:
        return _partition_by_method(config.model, parallel.tp, stages, parallel.pp_partition_method)
    if parallel.has_fixed_ends:
        by_rank = layers_per_rank_with_ends(config)
        return tuple(count // num_chunks(config) for count in by_rank) * num_chunks(config)
    embedding = parallel.account_for_embedding_in_pipeline_split
    loss = parallel.account_for_loss_in_pipeline_split
    counts = [(layers + embedding + loss) // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def layers_per_rank_with_ends(config: Config) -> tuple[int, ...]:
    """Return the layers of each rank if the first's or last's number is set; other ranks share the rest."""
    parallel = config.parallel
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    num_others = parallel.pp - (first is not None) - (last is not None)
    rest = config.model.num_layers - (first or 0) - (last or 0)
    others = [rest // num_others] * num_others if num_others > 0 else []
    return (*([] if first is None else [first]), *others, *([] if last is None else [last]))


def layers_of_stages(num_layers: int, counts: Sequence[int]) -> tuple[range, ...]:
    """Return the consecutive layers of each stage.

    Args:
        num_layers: layers of the whole model.
        counts: layers of each global stage; the config's rules ensure that they sum to `num_layers`.
    """
    assert sum(counts) == num_layers, (num_layers, counts)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def even_partition(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Split layers evenly, or with one more on the first stages, because the last stage computes the loss."""
    fewest, more = divmod(num_layers, num_stages)
    return tuple(fewest + (stage < more) for stage in range(num_stages))


def balanced_partition(
    weights: Sequence[int], num_stages: int, before: int = 0, after: int = 0
) -> tuple[int, ...]:
    """Split layers to minimize the heaviest stage's weight, and then the sum of squared weights.

    Args:
        weights: weight of each layer; there are at least as many layers as stages.
        num_stages: number of stages; each gets at least one layer.
        before: weight of the first stage besides its layers.
        after: weight of the last stage besides its layers.
    """
    assert len(weights) >= num_stages > 0
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(stage: int, start: int) -> tuple[tuple[int, int], int]:
        """Return ((heaviest, sum of squares), end of this stage) for the stages from `stage` on."""
        extra = before if stage == 0 else 0
        if stage == num_stages - 1:
            own = sums[-1] - sums[start] + after + extra
            return (own, own * own), len(weights)
        choices = []
        for end in range(start + 1, len(weights) - (num_stages - stage - 1) + 1):
            own = sums[end] - sums[start] + extra
            (heaviest, squares), _ = best(stage + 1, end)
            choices.append(((max(own, heaviest), own * own + squares), -end))
        cost, end = min(choices)  # of equal costs, the one with more layers in front
        return cost, -end

    counts, start = [], 0
    for stage in range(num_stages):
        _, end = best(stage, start)
        counts.append(end - start)
        start = end
    return tuple(counts)


def _partition_by_method(model: ModelConfig, tp: int, stages: int, method: str) -> tuple[int, ...]:
    """Split layers by DeepSpeed's method, which gives the embedding and the output layer weights too.

    Modules of multi-token prediction are a part of the last stage.
    """
    if method == "uniform":
        return even_partition(model.num_layers, stages)
    if method == "parameters":
        table = padded_vocab_size(model, tp) * model.hidden_size
        weights = [layer_weights(model, spec) for spec in model.layer_specs]
        return balanced_partition(weights, stages, table, table + mtp_weights(model))
    before, each, after = _weights_by_name(model, method)
    return balanced_partition([each] * model.num_layers, stages, before, after)


def _weights_by_name(model: ModelConfig, method: str) -> tuple[int, int, int]:
    """Return the weight, 0 or 1, of the embedding, of each layer and of the output under ``type:REGEX``.

    The output of a tied model has the embedding's class, as in BLOOM's ``type:transformer|embedding``: 70
    layers and two embeddings make 12 stages of 6.
    """
    pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
    head = HEAD_CLASS if model.untie_embeddings_and_output_weights else EMBEDDING_CLASS
    before, each, after = (int(bool(pattern.search(name))) for name in (EMBEDDING_CLASS, LAYER_CLASS, head))
    return before, each, after
