"""How many parameters a model has, and where they are."""

from __future__ import annotations

from megalite.config import ModelConfig
from megalite.config.stages import layer_parameters
from megalite.plan.job import Job


def norm_parameters(model: ModelConfig) -> int:
    """One normalization's: a weight, and a bias where it has one."""
    return model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)


def whole_layer_parameters(model: ModelConfig) -> int:
    """One layer's, on all tp ranks together."""
    return layer_parameters(model) + _cut_biases(model) + _whole_vectors(model)


def _cut_biases(model: ModelConfig) -> int:
    """Biases that are cut over tp: of queries, keys and values, and of the MLP's first product."""
    if not model.add_bias_linear:
        return 0
    gates = 2 if model.activation == "swiglu" else 1
    return (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_dim + gates * model.ffn_size


def _whole_vectors(model: ModelConfig) -> int:
    """What each tp rank has a whole copy of: two norms, and the biases of the two sums."""
    return 2 * norm_parameters(model) + (2 * model.hidden_size if model.add_bias_linear else 0)


def table_parameters(model: ModelConfig, tp: int) -> int:
    """The word table's, or the output weight's."""
    return model.padded_vocab_size(tp) * model.hidden_size


def embedding_extras(model: ModelConfig) -> int:
    """What stands with the word table: learned positions, a norm."""
    positions = model.num_positions if model.position_embedding_type == "learned_absolute" else 0
    return positions * model.hidden_size + (norm_parameters(model) if model.embed_layernorm else 0)


def total_parameters(model: ModelConfig, tp: int) -> int:
    """The whole model's, the padded rows of the vocabulary with them."""
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return (
        model.num_layers * whole_layer_parameters(model)
        + tables * table_parameters(model, tp)
        + embedding_extras(model)
        + norm_parameters(model)
    )


def layer_parameters_of_rank(job: Job) -> float:
    """One layer's, on one tp rank."""
    model = job.config.model
    return (layer_parameters(model) + _cut_biases(model)) / job.tp + _whole_vectors(model)


def rank_parameters(job: Job, rank: int) -> float:
    """Those of a pipeline rank's stages, on one tp rank; a tied table stands on both ends."""
    model, stages = job.config.model, job.stages.stages_of(rank)
    count = sum(job.layers[stage] for stage in stages) * layer_parameters_of_rank(job)
    is_first, is_last = 0 in stages, job.stages.num_stages - 1 in stages
    table = table_parameters(model, job.tp) / job.tp
    if is_first:
        count += table + embedding_extras(model)
    if is_last:
        count += norm_parameters(model)
        if model.untie_embeddings_and_output_weights or not is_first:
            count += table
    return count
