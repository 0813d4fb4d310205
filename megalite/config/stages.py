"""How many layers each global pipeline stage holds, by the options that say so.

The options and their meaning are Megatron-LM's and DeepSpeed's. What is read here has been checked by
`rules.pipeline`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megalite.config.config import Config
from megalite.config.model import ModelConfig
from megalite.config.partition import balanced_partition, even_partition

DEFAULT_CHUNKS = 2
"""Of an interleaved schedule that is asked for by name alone."""

SPLITS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pp_partition_method",
)
"""Options that make stages uneven, besides each stage's own number of layers."""

LAYER_CLASS = "ParallelTransformerLayerPipe"
EMBEDDING_CLASS = "EmbeddingPipe"
HEAD_CLASS = "LMHeadPipe"
"""Names that a regular expression of --pp-partition-method is held against: Megatron-DeepSpeed's classes."""


def num_chunks(config: Config) -> int:
    """Parts of the model that each rank holds, at least one."""
    parallel = config.parallel
    if parallel.schedule == "zb-v":
        return 2
    if parallel.schedule != "interleaved":
        return 1
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return config.model.num_layers // parallel.pp // parallel.num_layers_per_virtual_pipeline_stage or 1
    if parallel.pipeline_layers is not None:
        return len(parallel.pipeline_layers) // parallel.pp or 1
    return DEFAULT_CHUNKS


def num_stages(config: Config) -> int:
    """Global stages, over all ranks."""
    return config.parallel.pp * num_chunks(config)


def layers_per_stage(config: Config) -> tuple[int, ...]:
    """Layers of each global stage; what a sound config gives is not negative and adds up."""
    parallel, layers = config.parallel, config.model.num_layers
    stages = num_stages(config)
    if parallel.pp == 1:
        return (layers,)
    if parallel.pipeline_layers is not None:
        return parallel.pipeline_layers
    if parallel.pp_partition_method is not None:
        return _by_method(config.model, parallel.tp, stages, parallel.pp_partition_method)
    if parallel.has_given_ends:
        by_rank = layers_per_rank_with_ends(config)
        return tuple(count // num_chunks(config) for count in by_rank) * num_chunks(config)
    embedding = parallel.account_for_embedding_in_pipeline_split
    loss = parallel.account_for_loss_in_pipeline_split
    counts = [(layers + embedding + loss) // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def layers_per_rank_with_ends(config: Config) -> tuple[int, ...]:
    """Layers of each rank where those of the first or the last one are given; the others share the rest."""
    parallel = config.parallel
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    num_others = parallel.pp - (first is not None) - (last is not None)
    rest = config.model.num_layers - (first or 0) - (last or 0)
    others = [rest // num_others] * num_others if num_others > 0 else []
    return (*([] if first is None else [first]), *others, *([] if last is None else [last]))


def _by_method(model: ModelConfig, tp: int, stages: int, method: str) -> tuple[int, ...]:
    """Layers of each stage by DeepSpeed's method: what stands before and after the layers counts too."""
    if method == "uniform":
        return even_partition(model.num_layers, stages)
    if method == "parameters":
        table = model.padded_vocab_size(tp) * model.hidden_size
        return balanced_partition([layer_parameters(model)] * model.num_layers, stages, table, table)
    before, each, after = weights_by_name(model, method)
    return balanced_partition([each] * model.num_layers, stages, before, after)


def weights_by_name(model: ModelConfig, method: str) -> tuple[int, int, int]:
    """What a method ``type:REGEX`` counts: the embedding, each layer, the output.

    The output of a tied model is of the embedding's class, as BLOOM's ``type:transformer|embedding`` has it:
    70 layers and two embeddings make 12 stages of 6.
    """
    pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
    head = HEAD_CLASS if model.untie_embeddings_and_output_weights else EMBEDDING_CLASS
    before, each, after = (int(bool(pattern.search(name))) for name in (EMBEDDING_CLASS, LAYER_CLASS, head))
    return before, each, after


def layer_parameters(model: ModelConfig) -> int:
    """Elements of one layer's matrices."""
    queries = model.num_attention_heads * model.head_dim
    attention = model.hidden_size * 2 * (queries + model.num_kv_heads * model.head_dim)
    return attention + (3 if model.activation == "swiglu" else 2) * model.hidden_size * model.ffn_size


def words(counts: Sequence[int]) -> str:
    """Layers of stages, as they are given on a command line."""
    return " ".join(map(str, counts))
