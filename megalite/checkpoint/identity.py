"""What a checkpoint is bound to, and in what this run differs from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config import Config, ModelConfig
from megalite.config.data import CORPUS_FIELDS
from megalite.data.tokenizer_digest import digest_of
from megalite.errors import UserError
from megalite.optim.schedule import Schedule
from megalite.topology import Topology

PADDING = ("make_vocab_size_divisible_by", "pad_vocab_size_to")
"""Fields of the model for rows of the vocabulary that stand for no token."""
FREE = ("params_dtype", "hidden_dropout", "attention_dropout", "init_method_std")
"""Fields of the model that a run may change on its way."""
SAME_SHAPES = ("seq_length", "norm_epsilon", "rotary_base")
"""Fields of the model that change what its weights compute and not their shapes: free with --finetune."""
UNTIED = "untie_embeddings_and_output_weights"
DATA = (
    *(*CORPUS_FIELDS, "mock_data", "split", "blend_by", "fim_rate", "fim_spm_rate"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
)
"""Fields of the data on which a run's further samples depend."""
_ALIKE = {"activation": ("gelu", "gelu_exact", "relu"), "position_embedding_type": ("rope", "alibi", "none")}
"""Values between which the shapes of weights are the same."""


class Difference(NamedTuple):
    """A field that is not what the checkpoint was saved with."""

    name: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name} {_shown(self.saved)} (now {_shown(self.here)})"


def identity_of(config: Config, topology: Topology) -> dict[str, Any]:
    """What run.json tells of a run for later ones to compare; the layout and micro-batch size are free.

    The tokenizer is known to rank 0 alone, which writes and warns.
    """
    digest = digest_of(config.data, config.model.vocab_size) if topology.rank == 0 else None
    return {
        "model": dataclasses.asdict(config.model),
        # They make the order of samples and the dropout, with which a run goes on.
        "run": {
            "seed": config.training.seed,
            "global_batch_size": config.global_batch(topology.dp.size),
            "rampup_batch_size": list(config.training.rampup_batch_size or []) or None,
        },
        "schedule": Schedule.of(config).fields(),
        "data": {name: _plain(getattr(config.data, name)) for name in DATA},
        "tokenizer": digest,
    }


def check_identity(
    description: Mapping[str, Any], checkpoint: Path, config: Config, topology: Topology
) -> list[str]:
    """Compares a checkpoint with this run.

    Args:
        description: the checkpoint's run.json.

    Returns:
        What may differ, and does, in words for the log.

    Raises:
        UserError: with all that must not differ, by field, in one line for each of model, run and schedule.
        ValueError: the description is damaged.
    """
    here = identity_of(config, topology)
    mistakes, notices = list[str](), list[str]()
    wrong, told = _of_model(description["model"], config)
    if wrong:
        mistakes.append(_of_another(checkpoint, "model", wrong, _model_advice(wrong)))
    if told:
        notices.append(f"not as in checkpoint {checkpoint}: {_listed(told)}")
    if not config.checkpoint.finetune:
        wrong = list(_differences(description["run"], here["run"])) if description["run"] else []
        if wrong:
            mistakes.append(_of_another(checkpoint, "run", wrong, _run_advice(wrong, config)))
        saved_data = _mapping(description, "data")
        changed = list(_differences(saved_data, here["data"])) if saved_data else []
        if changed:
            notices.append(
                f"the data differ from the checkpoint's: {_listed(changed)}; "
                "the samples that follow are taken from the new order"
            )
        mistake, notice = _of_schedule(
            _mapping(description, "schedule"), here["schedule"], checkpoint, config
        )
        mistakes += mistake
        notices += notice
    tokenizers = description.get("tokenizer"), here["tokenizer"]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:
        notices.append(
            f"checkpoint {checkpoint} was trained with another tokenizer, so that ids mean other text: "
            "give the same one unless they are known to be equal"
        )
    if mistakes:
        raise UserError("\n".join(mistakes))
    return notices


def resumed_config(description: Mapping[str, Any], config: Config) -> Config:
    """The config, with the checkpoint's schedule where the run is to go on with it.

    Raises:
        ValueError: the description is damaged.
    """
    saved = _mapping(description, "schedule")
    if not (config.checkpoint.use_checkpoint_opt_param_scheduler and _loads_schedule(config) and saved):
        return config
    return dataclasses.replace(config, optimizer=Schedule.of(config).with_fields(saved).config)


def is_newly_untied(description: Mapping[str, Any], config: Config) -> bool:
    """Whether this run has an output weight of its own and the checkpoint has not."""
    return config.model.untie_embeddings_and_output_weights and not description["model"].get(UNTIED)


def _of_model(saved: Mapping[str, Any], config: Config) -> tuple[list[Difference], list[Difference]]:
    """Differences that stand in the way, and those that are told alone."""
    wrong, told = list[Difference](), list[Difference]()
    for difference in _differences(_resolved(_model_of(saved)) | _unknown(saved), _resolved(config.model)):
        is_free = difference.name in FREE or (
            (config.checkpoint.finetune and _keeps_shapes(difference)) or _unties(difference)
        )
        (told if is_free else wrong).append(difference)
    return wrong, told


def _keeps_shapes(difference: Difference) -> bool:
    """Whether weights of the one model fit into the other, which --finetune then takes them for."""
    alike = _ALIKE.get(difference.name, ())
    return difference.name in (*SAME_SHAPES, UNTIED) or (
        difference.saved in alike and difference.here in alike
    )


def _unties(difference: Difference) -> bool:
    """Whether the run gives a tied model an output weight of its own, which starts as the word table's."""
    return difference.name == UNTIED and difference.here


def _model_of(saved: Mapping[str, Any]) -> ModelConfig:
    """Raises: ValueError: it is none."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    return ModelConfig(**{name: value for name, value in saved.items() if name in known})


def _unknown(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the model that this version does not have."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    return {name: value for name, value in saved.items() if name not in known}


def _resolved(model: ModelConfig) -> dict[str, Any]:
    """The fields with the defaults that follow from others, and without what has no effect."""
    fields = dataclasses.asdict(model)
    for name in (*PADDING, "attention_backend"):
        del fields[name]
    try:
        fields["ffn_hidden_size"] = model.ffn_size
        fields["num_query_groups"] = model.num_kv_heads
        fields["kv_channels"] = model.head_dim
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError("run.json is damaged: its model is none") from error
    has_table = model.position_embedding_type == "learned_absolute"
    fields["max_position_embeddings"] = model.num_positions if has_table else None
    if model.position_embedding_type != "rope":
        fields["rotary_base"] = None
    return fields


def _model_advice(wrong: list[Difference]) -> str:
    if any(difference.name == UNTIED for difference in wrong):
        return (
            "its output weight differs from its word table and a tied model has no place for it: give "
            "--untie-embeddings-and-output-weights, or --finetune to drop it"
        )
    return "run with what it was saved with, or leave out --load"


def _run_advice(wrong: list[Difference], config: Config) -> str:
    advice = "run with what it was saved with, or leave out --load"
    for name, saved, _ in wrong:
        if name == "global_batch_size" and config.training.global_batch_size is None:
            advice = f"give --global-batch-size {saved}, which by default follows the number of replicas"
    return f"{advice}; --finetune takes the weights alone and starts a run of its own"


def _of_schedule(
    saved: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Path, config: Config
) -> tuple[list[str], list[str]]:
    """What is wrong with the schedule and what is to be told of it, none or one line each."""
    changed = list(_differences(saved, here))
    if not changed or not saved:
        return [], []
    if not _loads_schedule(config):
        return [], [f"the schedule differs from the checkpoint's: {_listed(changed)}"]
    if config.checkpoint.override_opt_param_scheduler:
        return [], [f"the command line's schedule is taken, not the checkpoint's: {_listed(changed)}"]
    if saved.keys() & {"lr_warmup_iters"} != here.keys() & {"lr_warmup_iters"}:
        advice = "one is counted in iterations, the other in samples: give --override-opt-param-scheduler"
    elif config.checkpoint.use_checkpoint_opt_param_scheduler:
        kept = [f"{name} {_shown(value)} (not {_shown(now)})" for name, value, now in changed]
        return [], [f"the checkpoint's schedule is kept: {', '.join(kept)}"]
    else:
        advice = (
            "give --override-opt-param-scheduler to go on with the new one, or "
            "--use-checkpoint-opt-param-scheduler to keep the old one"
        )
        decay = next((each for each in changed if each.name.startswith("lr_decay_")), None)
        if decay and getattr(config.optimizer, decay.name, 0) is None:
            unit = decay.name.removeprefix("lr_decay_")
            advice += f" (without --lr-decay-{unit} the decay ends with the run, at --train-{unit})"
    return [_of_another(checkpoint, "schedule", changed, advice)], []


def _loads_schedule(config: Config) -> bool:
    """Whether the checkpoint's schedule counts: it goes with the optimizer's state."""
    return config.checkpoint.load_optim and not config.checkpoint.finetune


def _of_another(checkpoint: Path, what: str, differences: list[Difference], advice: str) -> str:
    return f"checkpoint {checkpoint} is of another {what}: {_listed(differences)}; {advice}"


def _listed(differences: list[Difference]) -> str:
    return ", ".join(map(str, differences))


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**here, **saved}:
        if saved.get(name) != here.get(name):
            yield Difference(name, saved.get(name), here.get(name))


def _mapping(description: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """A part of run.json that converted checkpoints may lack; empty where it is missing."""
    found = description.get(part) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"run.json is damaged: its {part} is none")
    return found


def _plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
