"""Count the parameters of a model, a layer, and a rank."""

from __future__ import annotations

from megalite.config import ModelConfig
from megalite.config.stage_layers import layer_parameters
from megalite.plan.planned_run import PlannedRun


def norm_parameters(model: ModelConfig) -> int:
    """Return the parameters of one norm: a weight, and a bias with LayerNorm."""
    return model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)


def whole_layer_parameters(model: ModelConfig) -> int:
    """Return the parameters of one layer, on all tp ranks together."""
    return layer_parameters(model) + _sharded_biases(model) + _replicated_vectors(model)


def _sharded_biases(model: ModelConfig) -> int:
    """Return the size of the biases that tp shards: for queries, keys and values, and for the MLP's input."""
    if not model.add_bias_linear:
        return 0
    gates = 2 if model.is_gated else 1
    return (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_dim + gates * model.ffn_size


def _replicated_vectors(model: ModelConfig) -> int:
    """Return the parameters that are replicated over tp: two norms, and biases of row-parallel layers."""
    return 2 * norm_parameters(model) + (2 * model.hidden_size if model.add_bias_linear else 0)


def table_parameters(model: ModelConfig, tp: int) -> int:
    """Return the parameters of the token embedding, or of the output weight."""
    return model.padded_vocab_size(tp) * model.hidden_size


def embedding_extras(model: ModelConfig) -> int:
    """Return the other parameters of the embedding: learned positions, token types, a norm."""
    positions = model.num_positions if model.position_embedding_type == "learned_absolute" else 0
    rows = positions + model.num_token_types
    return rows * model.hidden_size + (norm_parameters(model) if model.embed_layernorm else 0)


def sharded_head_parameters(model: ModelConfig, tp: int) -> int:
    """Return the parameters of the head that tp shards, except its weight: BERT's bias of the logits."""
    return model.padded_vocab_size(tp) if model.architecture == "bert" else 0


def replicated_head_parameters(model: ModelConfig) -> int:
    """Return the parameters after the last layer that are replicated over tp: a norm, and BERT's heads."""
    count = norm_parameters(model) if model.norm_position == "pre" else 0
    if model.architecture == "bert":
        h, bias = model.hidden_size, 1 if model.add_bias_linear else 0
        count += h * (h + bias) + norm_parameters(model)
        count += (h * (h + bias) + 2 * (h + bias)) if model.bert_binary_head else 0
    return count


def total_parameters(model: ModelConfig, tp: int) -> int:
    """Return the parameters of the whole model, with the vocabulary's padding."""
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return (
        model.num_layers * whole_layer_parameters(model)
        + tables * table_parameters(model, tp)
        + embedding_extras(model)
        + sharded_head_parameters(model, tp)
        + replicated_head_parameters(model)
    )


def layer_parameters_of_rank(run: PlannedRun) -> float:
    """Return the parameters of one layer on one tp rank."""
    model = run.config.model
    return (layer_parameters(model) + _sharded_biases(model)) / run.tp + _replicated_vectors(model)


def rank_parameters(run: PlannedRun, rank: int) -> float:
    """Return the parameters of a pipeline rank on one tp rank; both ends hold a tied embedding."""
    stages = run.stages.stages_of(rank)
    layers = sum(run.layers[stage] for stage in stages) * layer_parameters_of_rank(run)
    return layers + edge_parameters(run, 0 in stages, run.stages.num_stages - 1 in stages)


def edge_parameters(run: PlannedRun, is_first: bool, is_last: bool) -> float:
    """Return the parameters outside the layers, on one tp rank with the first or last stage."""
    model, count = run.config.model, 0.0
    table = table_parameters(model, run.tp) / run.tp
    if is_first:
        count += table + embedding_extras(model)
    if is_last:
        count += sharded_head_parameters(model, run.tp) / run.tp + replicated_head_parameters(model)
        if model.untie_embeddings_and_output_weights or not is_first:
            count += table
    return count
