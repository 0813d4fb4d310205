"""Record the settings that a checkpoint depends on, and find the differences of a run that loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config import CheckpointConfig, Config, ModelConfig
from megalite.config.fields import (
    config_fields,
    fields_by_name,
    fields_with,
    resolved_fields,
    resume_rule,
    without_effect,
)
from megalite.config.option import OnResume
from megalite.config.parameter_schedules import OptimizerSchedules
from megalite.data.corpus_record import (
    DataRecord,
    data_differences,
    reordered_corpora,
    samples_lost_and_repeated,
)
from megalite.data.tokenizers.tokenizer import digest_of
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError

UNTIED = "untie_embeddings_and_output_weights"
_SAME_ADVICE = "use the checkpoint's values, or remove --load"
_FINETUNE_ADVICE = "--finetune loads only the weights and starts a new run"


class Difference(NamedTuple):
    """Field whose value differs from the checkpoint."""

    name: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name} {_shown(self.saved)} (now {_shown(self.here)})"


def compatibility_record(
    config: Config, topology: Topology, data: DataRecord | None = None
) -> dict[str, Any]:
    """Return the record of a run in run.json, which later runs compare by each field's `OnResume`.

    Only rank 0, which writes and warns, knows the tokenizer.

    Args:
        data: identity of the run's data; known on rank 0, and None if the tokens are random.
    """
    digest = digest_of(config.data, config.model.vocab_size) if topology.rank == 0 else None
    return {
        "model": dataclasses.asdict(config.model),
        # They determine sample order and dropout, which a resumed run continues.
        "run": {
            "seed": config.training.seed,
            "global_batch_size": config.global_batch(topology.sample_ranks.size),
            "rampup_batch_size": list(config.training.rampup_batch_size or []) or None,
            "step_batch_size_schedule": list(config.training.step_batch_size_schedule or []) or None,
            "seq_length_schedule": list(config.training.seq_length_schedule or []) or None,
        },
        "schedule": OptimizerSchedules.of(config, topology.sample_ranks.size).fields(),
        "settings": _values(config, OnResume.SETTING, OnResume.LOGGED),
        "data": _values(config, OnResume.DATA, OnResume.CORPUS),
        "corpora": None if data is None else data.for_json(),
        "tokenizer": digest,
    }


def _values(config: Config, *rules: OnResume) -> dict[str, Any]:
    """Return the fields that have one of these rules and an effect, as they come back from JSON."""
    names = fields_with(*rules) - without_effect(config_fields(), config.values()).keys()
    return {name: _from_json(value) for name, value in config.values().items() if name in names}


def _from_json(value: Any) -> Any:
    """Return a field's value as it comes back from JSON: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value


class _Mistake(str):
    """Difference that prevents loading; other texts are notices for the log."""


def check_compatibility(
    description: Mapping[str, Any],
    checkpoint: Path | str,
    config: Config,
    topology: Topology,
    data: DataRecord | None = None,
) -> list[str]:
    """Compare a checkpoint with this run.

    Args:
        description: content of the checkpoint's run.json.
        data: identity of this run's data; corpora are compared on the ranks that know them, including rank 0.

    Returns:
        Allowed differences, for the log.

    Raises:
        UserError: there are differences that are not allowed. It has one line for each part of run.json.
        ValueError: the description is damaged.
    """
    here = compatibility_record(config, topology, data)
    found = [*_compare_models(description["model"], checkpoint, config)]
    if not config.checkpoint.finetune:
        found += _compare_runs(description["run"], here["run"], checkpoint, config)
        found += _compare_schedules(_mapping(description, "schedule"), here["schedule"], checkpoint, config)
        found += _compare_data(description, here, checkpoint, config, topology.sample_ranks.size)
    found += _compare_settings(description, here, checkpoint, config)
    if None not in (saved := description.get("tokenizer"), here["tokenizer"]) and saved != here["tokenizer"]:
        found.append(
            f"checkpoint {checkpoint} was trained with another tokenizer, so ids mean other text: pass the "
            "same tokenizer unless you know that they are equal"
        )
    if mistakes := [each for each in found if isinstance(each, _Mistake)]:
        raise UserError("\n".join(mistakes))
    return found


def resumed_config(description: Mapping[str, Any], config: Config) -> Config:
    """Return the config, with the checkpoint's learning-rate schedule if the run must keep it.

    Raises:
        ValueError: the description is damaged.
    """
    saved, checkpoint = _mapping(description, "schedule"), config.checkpoint
    if not (checkpoint.use_checkpoint_opt_param_scheduler and loads_optimizer(checkpoint) and saved):
        return config
    schedules = OptimizerSchedules.of(config, dp=1)  # the fields do not depend on the batch size
    return dataclasses.replace(config, optimizer=schedules.with_fields(saved).config)


def loads_optimizer(checkpoint: CheckpointConfig) -> bool:
    """Return whether a run loads the optimizer state, and with it the learning-rate schedule."""
    return checkpoint.load_optim and not checkpoint.finetune


def is_newly_untied(description: Mapping[str, Any], config: Config) -> bool:
    """Return whether this run has a separate output weight and the checkpoint has none."""
    return config.model.untie_embeddings_and_output_weights and not description["model"].get(UNTIED)


def model_differences(saved: ModelConfig, here: ModelConfig) -> list[Difference]:
    """Return the fields in which two models differ, except precision and fields without effect."""
    return _without_following(_differences(_resolved(saved), _resolved(here)))


def _without_following(differences: Iterator[Difference]) -> list[Difference]:
    """Return differences of resolved fields, without those that only follow from others.

    A field without effect in one of the models is None there. If it has its default in the other model, the
    difference is in the field that gives it an effect.
    """
    found = list(differences)
    return [each for each in found if not _follows(each)] or found


def _follows(difference: Difference) -> bool:
    field = fields_by_name().get(difference.name)
    values = difference.saved, difference.here
    return field is not None and field.default is not None and None in values and field.default in values


def _compare_models(saved: Mapping[str, Any], checkpoint: Path | str, config: Config) -> Iterator[str]:
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    model = ModelConfig(**{name: value for name, value in saved.items() if name in known})
    unknown_fields = {name: value for name, value in saved.items() if name not in known}
    refused, allowed = list[Difference](), list[Difference]()
    for difference in _without_following(
        _differences(_resolved(model) | unknown_fields, _resolved(config.model))
    ):
        is_free = config.checkpoint.finetune and _keeps_shapes(difference)
        unties = difference.name == UNTIED and difference.here  # the output weight starts as the word table
        (allowed if is_free or unties else refused).append(difference)
    if any(difference.name == UNTIED for difference in refused):
        yield _mistake(
            checkpoint,
            "has another model",
            refused,
            "its output weight differs from its word embedding, but a tied model has only one weight: pass "
            "--untie-embeddings-and-output-weights, or --finetune to drop it",
        )
    elif refused:
        yield _mistake(checkpoint, "has another model", refused, _SAME_ADVICE)
    yield from _changed(checkpoint, allowed)


def _keeps_shapes(difference: Difference) -> bool:
    """Return whether the weights of one model fit into the other, so that --finetune can load them."""
    if difference.name == UNTIED:
        return True
    field = fields_by_name().get(difference.name)
    allowed = False if field is None else field.declared.same_shapes
    if isinstance(allowed, bool):
        return allowed
    return difference.saved in allowed and difference.here in allowed


def _resolved(model: ModelConfig) -> dict[str, Any]:
    """Return the fields as they come back from JSON, with resolved defaults, except fields without effect."""
    try:
        return {name: _from_json(value) for name, value in resolved_fields(model).items()}
    except (TypeError, LookupError, ArithmeticError) as error:
        raise ValueError("run.json is damaged: its model has impossible values") from error


def _compare_runs(
    saved: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Path | str, config: Config
) -> Iterator[str]:
    differences = list(_differences(saved, here)) if saved else []  # converted checkpoints have no run
    if not differences:
        return
    advice = _SAME_ADVICE
    for name, value, _ in differences:
        if name == "global_batch_size" and config.training.global_batch_size is None:
            advice = f"pass --global-batch-size {value}; its default depends on the number of replicas"
    yield _mistake(checkpoint, "belongs to another run", differences, f"{advice}; {_FINETUNE_ADVICE}")


def _compare_schedules(
    saved: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Path | str, config: Config
) -> Iterator[str]:
    differences = list(_differences(saved, here)) if saved else []
    if not differences:
        return
    if not loads_optimizer(config.checkpoint):
        yield f"the schedule differs from the checkpoint's: {_listed(differences)}"
        return
    if config.checkpoint.override_opt_param_scheduler:
        yield f"the command line's schedule is used, not the checkpoint's: {_listed(differences)}"
        return
    if saved.keys() & {"lr_warmup_iters"} != here.keys() & {"lr_warmup_iters"}:
        advice = "one counts iterations, the other samples: pass --override-opt-param-scheduler"
    elif config.checkpoint.use_checkpoint_opt_param_scheduler:
        if "decoupled_lr" not in saved.keys() - here.keys():
            kept = [f"{name} {_shown(value)} (not {_shown(now)})" for name, value, now in differences]
            yield f"the checkpoint's schedule is kept: {', '.join(kept)}"
            return
        advice = f"also pass --decoupled-lr {saved['decoupled_lr']}: the optimizer groups its weights by it"
    else:
        advice = (
            "pass --override-opt-param-scheduler to continue with the new one, or "
            "--use-checkpoint-opt-param-scheduler to keep the old one"
        )
        decay = next((each for each in differences if each.name.startswith("lr_decay_")), None)
        if decay and getattr(config.optimizer, decay.name, 0) is None:
            unit = decay.name.removeprefix("lr_decay_")
            advice += f" (without --lr-decay-{unit} the decay ends with the run, at --train-{unit})"
    yield _mistake(checkpoint, "has another schedule", differences, advice)


def _compare_settings(
    description: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Path | str, config: Config
) -> Iterator[str]:
    saved = {name: value for name, value in description["model"].items() if name in here["settings"]}
    if not config.checkpoint.finetune:  # a new run can have other settings
        saved |= _mapping(description, "settings")
    refused, harmless = list[Difference](), list[Difference]()
    for difference in _differences_of_shared(saved, here["settings"]):
        is_harmless = resume_rule(difference.name) is OnResume.LOGGED
        (harmless if is_harmless else refused).append(difference)
    yield from _changed(checkpoint, harmless)
    loads = loads_optimizer(config.checkpoint)
    if loads and any(difference.name == "optimizer" for difference in refused):
        advice = f"its optimizer state is of another kind: pass --no-load-optim; {_FINETUNE_ADVICE}"
        yield _mistake(checkpoint, "has other settings", refused, advice)
    elif refused and (not loads or config.checkpoint.allow_settings_change):
        yield f"the settings differ from the checkpoint's: {_listed(refused)}"
    elif refused:
        advice = (
            "use the checkpoint's values, or pass --allow-settings-change to continue with the new ones; "
            f"{_FINETUNE_ADVICE}"
        )
        yield _mistake(checkpoint, "has other settings", refused, advice)


def _compare_data(
    description: Mapping[str, Any], here: Mapping[str, Any], checkpoint: Path | str, config: Config, dp: int
) -> Iterator[str]:
    recorded = {**_mapping(description, "data")}
    if recorded and here["data"].get("shuffle_block"):
        recorded.setdefault("shuffle_block", 1)  # windows once had no blocks
    options = list(_differences_of_shared(recorded, here["data"]))
    changed = [str(each) for each in options if resume_rule(each.name) is not OnResume.CORPUS]
    if description.get("data") and "settings" not in description:
        yield (
            f"checkpoint {checkpoint} was saved by an earlier version, which did not record the contents of "
            "its corpora or the optimizer settings: changes of these are not detected"
        )
    saved = _mapping(description, "corpora")
    knows_both = bool(saved) and here["corpora"] is not None
    if knows_both:
        trained, evaluated = data_differences(saved, here["corpora"], _num_consumed(description))
        changed += trained
        if evaluated:
            yield f"evaluation reads other data than the checkpoint's run: {', '.join(evaluated)}"
    elif flags := [each for each in options if resume_rule(each.name) is OnResume.CORPUS]:
        yield f"data flags differ from the checkpoint's: {_listed(flags)}"
    if not changed:
        yield from _reordered(description, config, dp)
    elif config.checkpoint.allow_data_change:
        notice = (
            f"the data differ from the checkpoint's: {', '.join(changed)}; the next samples follow the new "
            "order"
        )
        if knows_both:
            numbers = _num_consumed(description), _num_samples(config, dp)
            notice = "; ".join([notice, *samples_lost_and_repeated(saved, here["corpora"], *numbers)])
        yield notice
    else:
        yield _Mistake(
            f"checkpoint {checkpoint} was trained on other data: {', '.join(changed)}; use the checkpoint's "
            f"data, or pass --allow-data-change to continue in the order of the new data; {_FINETUNE_ADVICE}"
        )


def _reordered(description: Mapping[str, Any], config: Config, dp: int) -> Iterator[str]:
    """Yield a notice of the corpora that the new length of the run reorders."""
    saved, settings = _mapping(description, "corpora"), _mapping(description, "settings")
    length = {name: settings[name] for name in ("train_iters", "train_samples") if name in settings}
    is_packed = config.data.sft or config.data.packs_documents
    if (
        not saved
        or not length
        or is_packed
        or config.data.reads_windows
        or config.model.architecture != "gpt"
    ):
        return
    before = dataclasses.replace(config, training=dataclasses.replace(config.training, **length))
    numbers = _num_consumed(description), _num_samples(before, dp), _num_samples(config, dp)
    if texts := reordered_corpora(saved, *numbers, config.model.seq_length):
        yield f"the new length of the run reorders the samples of {'; '.join(texts)}"


def _num_consumed(description: Mapping[str, Any]) -> int:
    return int(_mapping(description, "progress").get("consumed_samples", 0))


def _num_samples(config: Config, dp: int) -> int:
    return config.batch_size(dp).consumed_before(config.num_iterations(dp) + 1)


def _mistake(checkpoint: Path | str, what: str, differences: list[Difference], advice: str) -> _Mistake:
    return _Mistake(f"checkpoint {checkpoint} {what}: {_listed(differences)}; {advice}")


def _changed(checkpoint: Path | str, differences: list[Difference]) -> Iterator[str]:
    if differences:
        yield f"changed since checkpoint {checkpoint}: {_listed(differences)}"


def _listed(differences: list[Difference]) -> str:
    return ", ".join(map(str, differences))


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**here, **saved}:
        if saved.get(name) != here.get(name):
            yield Difference(name, saved.get(name), here.get(name))


def _differences_of_shared(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield differences in fields that both have, and in fields that this version does not know."""
    for difference in _differences(saved, here):
        is_unknown = resume_rule(difference.name) is None
        if is_unknown or (difference.name in saved and difference.name in here):
            yield difference


def _mapping(description: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return a part of run.json. It is empty if it is missing, as in converted checkpoints."""
    found = description.get(part) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"run.json is damaged: its {part} is not an object")
    return found


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
