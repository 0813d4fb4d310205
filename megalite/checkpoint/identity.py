"""What a checkpoint is bound to, and in what this run differs from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config import Config, ModelConfig
from megalite.config.comparison import RESUME_RULES, OnResume, fields_with
from megalite.data.corpus_record import DataRecord, data_differences
from megalite.data.tokenizer_digest import digest_of
from megalite.errors import UserError
from megalite.optim.schedule import Schedule
from megalite.topology import Topology

SAME_SHAPES = ("seq_length", "norm_epsilon", "rotary_base")
"""Fields of the model that change what its weights compute and not their shapes: free with --finetune."""
UNTIED = "untie_embeddings_and_output_weights"
_ALIKE = {"activation": ("gelu", "gelu_exact", "relu"), "position_embedding_type": ("rope", "alibi", "none")}
"""Values between which the shapes of weights are the same."""
_DYNAMIC_LOSS_SCALE = ("min_loss_scale", "loss_scale_window", "hysteresis")
_FILL_IN_MIDDLE = ("fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token")


class Difference(NamedTuple):
    """A field that is not what the checkpoint was saved with."""

    name: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name} {_shown(self.saved)} (now {_shown(self.here)})"


def identity_of(config: Config, topology: Topology, data: DataRecord | None = None) -> dict[str, Any]:
    """Return what run.json records of a run for later ones to compare; `comparison` has each field's rule.

    The tokenizer is known to rank 0 alone, which writes and warns.

    Args:
        data: what the run reads; known to rank 0, and None where the tokens are random.
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
        "settings": _settings(config),
        "data": _data_options(config),
        "corpora": None if data is None else data.for_json(),
        "tokenizer": digest,
    }


def _settings(config: Config) -> dict[str, Any]:
    """Return the fields that must not change or whose change is logged, without those that have no effect."""
    without_effect = set[str]()
    if config.model.params_dtype != "fp16":
        without_effect |= {"loss_scale", "initial_loss_scale", *_DYNAMIC_LOSS_SCALE}
    elif config.optimizer.loss_scale is not None:
        without_effect |= {"initial_loss_scale", *_DYNAMIC_LOSS_SCALE}
    if not config.training.check_for_spiky_loss:
        without_effect.add("spiky_loss_factor")
    names = set(fields_with(OnResume.SETTING) + fields_with(OnResume.LOGGED)) - without_effect
    return _values(config, names)


def _data_options(config: Config) -> dict[str, Any]:
    """Return the fields of the data, without those that have no effect."""
    names = set(fields_with(OnResume.DATA) + fields_with(OnResume.CORPUS))
    if config.data.fim_rate == 0 or config.data.mock_data:
        names -= set(_FILL_IN_MIDDLE)
    return _values(config, names)


def _values(config: Config, names: Collection[str]) -> dict[str, Any]:
    """Return the values of these fields as JSON gives them back."""
    return {
        field.name: _plain(getattr(part, field.name))
        for part in (getattr(config, group.name) for group in dataclasses.fields(config))
        for field in dataclasses.fields(part)
        if field.name in names
    }


def check_identity(
    description: Mapping[str, Any],
    checkpoint: Path,
    config: Config,
    topology: Topology,
    data: DataRecord | None = None,
) -> list[str]:
    """Compares a checkpoint with this run.

    Args:
        description: the checkpoint's run.json.
        data: what this run reads; corpora are compared on the ranks that know them, rank 0 among them.

    Returns:
        What may differ, and does, in words for the log.

    Raises:
        UserError: with all that must not differ, by field, in a line for each part of run.json.
        ValueError: the description is damaged.
    """
    here = identity_of(config, topology, data)
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
        mistake, notice = _of_schedule(
            _mapping(description, "schedule"), here["schedule"], checkpoint, config
        )
        mistakes += mistake
        notices += notice
        if description.get("data") and "settings" not in description:
            notices.append(
                f"checkpoint {checkpoint} was saved by an earlier version, which recorded neither what its "
                "corpora hold nor the optimizer's settings: whether these have changed is not checked"
            )
        mistake, notice = _of_data(description, here, checkpoint, config)
        mistakes += mistake
        notices += notice
    mistake, notice = _of_settings(description, here, checkpoint, config)
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
        is_free = (config.checkpoint.finetune and _keeps_shapes(difference)) or _unties(difference)
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
    fields = {name: getattr(model, name) for name in fields_with(OnResume.MODEL)}
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


def _of_settings(
    description: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Path, config: Config
) -> tuple[list[str], list[str]]:
    """Return what is wrong with the settings and what is logged of them."""
    saved = {name: value for name, value in description["model"].items() if name in here["settings"]}
    if not config.checkpoint.finetune:  # a run of its own has settings of its own
        saved |= _mapping(description, "settings")
    changed, logged = list[Difference](), list[Difference]()
    for difference in _differences_of_shared(saved, here["settings"]):
        is_harmless = RESUME_RULES.get(difference.name) is OnResume.LOGGED
        (logged if is_harmless else changed).append(difference)
    notices = [f"not as in checkpoint {checkpoint}: {_listed(logged)}"] if logged else []
    if not changed:
        return [], notices
    if not _loads_schedule(config) or config.checkpoint.allow_settings_change:
        return [], [*notices, f"the settings differ from the checkpoint's: {_listed(changed)}"]
    advice = (
        "run with what it was saved with, or pass --allow-settings-change to continue with the new ones"
        "; --finetune takes the weights alone and starts a run of its own"
    )
    return [f"checkpoint {checkpoint} has other settings: {_listed(changed)}; {advice}"], notices


def _of_data(
    description: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Path, config: Config
) -> tuple[list[str], list[str]]:
    """Return what is wrong with the data and what is logged of them."""
    options = list(_differences_of_shared(_mapping(description, "data"), here["data"]))
    changed = [str(each) for each in options if RESUME_RULES.get(each.name) is not OnResume.CORPUS]
    notices = []
    saved = _mapping(description, "corpora")
    if saved and here["corpora"] is not None:
        trained, evaluated = data_differences(saved, here["corpora"])
        changed += trained
        if evaluated:
            notices.append(f"evaluation reads other data than the checkpoint's run: {', '.join(evaluated)}")
    elif flags := [each for each in options if RESUME_RULES.get(each.name) is OnResume.CORPUS]:
        notices.append(f"the flags of the data differ from the checkpoint's: {_listed(flags)}")
    if not changed:
        return [], notices
    if config.checkpoint.allow_data_change:
        told = f"the data differ from the checkpoint's: {', '.join(changed)}"
        return [], [f"{told}; the samples that follow are taken from the new order", *notices]
    advice = (
        "run with what it was saved with, or pass --allow-data-change to continue in the order of the new "
        "data; --finetune takes the weights alone and starts a run of its own"
    )
    return [f"checkpoint {checkpoint} is of other data: {', '.join(changed)}; {advice}"], notices


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


def _differences_of_shared(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield differences of fields that both have, and of those that this version does not know."""
    for difference in _differences(saved, here):
        is_unknown = difference.name not in RESUME_RULES
        if is_unknown or (difference.name in saved and difference.name in here):
            yield difference


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
