"""What must be as in a checkpoint, what may differ, and how both are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.compatibility import check_compatibility, compatibility_record, resumed_config
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.fields import ConfigField, config_fields, fields_by_name
from megalite.config.option import AnyOf, OnResume, Range, Setting
from megalite.config.parameter_schedules import OptimizerSchedules
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError

FOLDER = Path("SAVE/iter_0000010")
CONFIG = Config(
    model=ModelConfig(vocab_size=256, num_layers=2, hidden_size=64, num_attention_heads=4),
    data=DataConfig(data_path=("corpus",), tokenizer_type="byte"),
    training=TrainingConfig(train_iters=100, global_batch_size=8),
)
FINETUNE = CheckpointConfig(load="SAVE", finetune=True)
LOGGED: list[tuple[str, dict[str, Any], str]] = [
    ("model", {"untie_embeddings_and_output_weights": True}, "output_weights False (now True)"),
    ("data", {"data_path": ("other", "corpus")}, "data flags differ from the checkpoint's: data_path"),
    ("training", {"eval_interval": 5}, f"changed since checkpoint {FOLDER}: eval_interval 1000 (now 5)"),
]
ALLOWED_BY: list[tuple[str, str, dict[str, Any], str]] = [
    ("settings", "model", {"hidden_dropout": 0.0}, "hidden_dropout 0.1 (now 0.0)"),
    ("settings", "model", {"params_dtype": "bf16"}, "params_dtype fp32 (now bf16)"),
    (
        "settings",
        "optimizer",
        {"clip_grad": 0.5, "adam_eps": 1e-6},
        "adam_eps 1e-08 (now 1e-06), clip_grad 1.0",
    ),
    ("data", "data", {"fim_rate": 0.5}, "fim_rate 0.0 (now 0.5); "),
    (
        "data",
        "data",
        {"mock_data": True, "eod_mask_loss": True},
        "eod_mask_loss False (now True), mock_data False",
    ),
]
SILENT: list[tuple[str, dict[str, Any]]] = [
    ("model", {"ffn_hidden_size": 256, "kv_channels": 16, "num_query_groups": 4}),
    ("model", {"max_position_embeddings": 1024, "make_vocab_size_divisible_by": 64, "rotary_base": 3.0}),
    ("model", {"attention_backend": "unfused"}),
    ("parallel", {"tensor_model_parallel_size": 2}),
    ("training", {"micro_batch_size": 2}),
    ("optimizer", {"lr_decay_iters": 100, "hysteresis": 3}),
    ("data", {"fim_prefix_token": "<p>"}),
    ("training", {"spiky_loss_factor": 3.0}),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "model",
        {"hidden_size": 128},
        "has another model: hidden_size 64 (now 128), kv_channels 16 (now 32), ffn_hidden_size 256 (now 512)",
    ),
    ("model", {"activation": "swiglu"}, "activation gelu (now swiglu)"),
    ("model", {"normalization": "RMSNorm"}, "normalization LayerNorm (now RMSNorm)"),
    ("model", {"position_embedding_type": "rope"}, "position_embedding_type learned_absolute (now rope)"),
    ("model", {"max_position_embeddings": 2048}, "max_position_embeddings 1024 (now 2048)"),
    ("model", {"vocab_size": 300}, "vocab_size 256 (now 300)"),
]
WRONG_OF_A_RUN: list[tuple[str, dict[str, Any], str]] = [
    ("model", {"norm_epsilon": 1e-6}, "norm_epsilon 1e-05 (now 1e-06)"),
    ("model", {"activation": "relu"}, "activation gelu (now relu)"),
    ("training", {"seed": 9}, "belongs to another run: seed 1234 (now 9); use the"),
    ("training", {"global_batch_size": 16}, "belongs to another run: global_batch_size 8 (now 16); use the"),
    (
        "training",
        {"global_batch_size": None},
        "global_batch_size 8 (now 1); pass --global-batch-size 8; its default",
    ),
    ("training", {"rampup_batch_size": (2, 2, 8)}, "rampup_batch_size None (now 2 2 8)"),
]


@pytest.fixture
def topology() -> Iterator[Topology]:
    with Topology.fake(ParallelConfig().mesh, 1, 0) as topology:
        yield topology


@pytest.fixture
def compare(topology: Topology):
    """Notices for a run that loads what another saved."""

    def compare(saved: Config, here: Config, **parts: Any) -> list[str]:
        description = json.loads(json.dumps(compatibility_record(saved, topology))) | parts
        return check_compatibility(description, FOLDER, here, topology)

    return compare


def changed(group: str, values: dict[str, Any], config: Config = CONFIG) -> Config:
    return replace(config, **{group: replace(getattr(config, group), **values)})


def finetuned(config: Config) -> Config:
    return replace(config, checkpoint=FINETUNE)


def test_the_same_run_has_nothing_to_tell(compare) -> None:
    assert compare(CONFIG, CONFIG) == []


@pytest.mark.parametrize(("group", "values", "words"), LOGGED)
def test_harmless_changes_are_logged(compare, group: str, values: dict[str, Any], words: str) -> None:
    (notice,) = compare(CONFIG, changed(group, values))
    assert words in notice


@pytest.mark.parametrize(("flag", "group", "values", "words"), ALLOWED_BY)
def test_other_updates_and_samples_are_refused_unless_a_flag_allows_them(
    compare, flag: str, group: str, values: dict[str, Any], words: str
) -> None:
    here = changed(group, values)
    with pytest.raises(UserError, match=f"pass --allow-{flag}-change to continue") as caught:
        compare(CONFIG, here)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    (notice,) = compare(CONFIG, resuming(here, **{f"allow_{flag}_change": True}))
    assert f"the {flag} differ from the checkpoint's" in notice
    assert words.strip("; ") in notice


def test_a_checkpoint_of_an_earlier_version_says_once_what_is_not_compared(
    compare, topology: Topology
) -> None:
    saved = json.loads(json.dumps(compatibility_record(CONFIG, topology)))
    del saved["settings"], saved["corpora"]
    here = changed("optimizer", {"clip_grad": 0.5})
    (notice,) = check_compatibility(saved, FOLDER, here, topology)
    assert "saved by an earlier version" in notice
    with pytest.raises(UserError, match=r"hidden_dropout 0.1 \(now 0.3\)"):  # which it did record
        check_compatibility(saved, FOLDER, changed("model", {"hidden_dropout": 0.3}), topology)


def test_windows_of_a_time_without_blocks_are_blocks_of_one(compare, topology: Topology) -> None:
    windows = changed("data", {"mock_data": False, "sample_order": "windows", "shuffle_block": 64})
    saved = json.loads(json.dumps(compatibility_record(windows, topology)["data"]))
    assert compare(windows, windows, data=saved) == []
    del saved["shuffle_block"]
    with pytest.raises(UserError, match=r"shuffle_block 1 \(now 64\)"):
        compare(windows, windows, data=saved)
    assert compare(windows, windows, data={}) == []  # a converted checkpoint


def test_a_setting_of_a_later_version_is_refused(compare, topology: Topology) -> None:
    saved = json.loads(json.dumps(compatibility_record(CONFIG, topology)["settings"])) | {
        "adam_amsgrad": True
    }
    with pytest.raises(UserError, match=r"other settings: adam_amsgrad True \(now None\)"):
        compare(CONFIG, CONFIG, settings=saved)


def test_another_optimizer_cannot_continue_with_the_state(compare) -> None:
    muon = replace(CONFIG, optimizer=replace(CONFIG.optimizer, optimizer="muon"))
    for allows in (False, True):
        checkpoint = replace(CONFIG.checkpoint, allow_settings_change=allows)
        with pytest.raises(UserError, match=r"optimizer adam \(now muon\); .*pass --no-load-optim"):
            compare(CONFIG, replace(muon, checkpoint=checkpoint))
    compare(CONFIG, replace(muon, checkpoint=CheckpointConfig(load="SAVE", load_optim=False)))


@pytest.mark.parametrize(("group", "values"), SILENT)
def test_what_makes_no_difference_is_not_reported(compare, group: str, values: dict[str, Any]) -> None:
    assert compare(CONFIG, changed(group, values)) == []
    assert compare(changed(group, values), CONFIG) == []


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize(("group", "values", "words"), WRONG)
def test_another_shape_is_refused(
    compare, group: str, values: dict[str, Any], words: str, finetune: bool
) -> None:
    here = changed(group, values)
    with pytest.raises(UserError) as caught:
        compare(CONFIG, finetuned(here) if finetune else here)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"checkpoint {FOLDER} has another")


@pytest.mark.parametrize(("group", "values", "words"), WRONG_OF_A_RUN)
def test_another_run_is_refused_and_free_with_finetune(
    compare, group: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        compare(CONFIG, changed(group, values))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(compare(CONFIG, finetuned(changed(group, values)))) == (group == "model")


def test_what_follows_from_another_field_is_not_named(compare) -> None:
    """Options of rope have no effect in the saved model, and their defaults here."""
    alibi, rope = (changed("model", {"position_embedding_type": each}) for each in ("alibi", "rope"))
    with pytest.raises(UserError) as caught:
        compare(alibi, rope)
    assert "has another model: position_embedding_type alibi (now rope); use" in str(caught.value)
    with pytest.raises(UserError, match=r"rotary_base None \(now 500.0\)"):
        compare(alibi, changed("model", {"rotary_base": 500.0}, rope))


def test_everything_is_reported_at_once(compare) -> None:
    here = changed("optimizer", {"lr": 1.0}, changed("training", {"seed": 9}))
    here = changed("model", {"num_layers": 4, "vocab_size": 300}, here)
    with pytest.raises(UserError) as caught:
        compare(CONFIG, here)
    model, run, schedule = str(caught.value).splitlines()
    assert "another model: num_layers 2 (now 4), vocab_size 256 (now 300); use the" in model
    assert "another run: seed 1234 (now 9); use the" in run
    assert "another schedule: lr 0.0003 (now 1.0); pass --override-opt-param-scheduler" in schedule


def test_a_tied_model_takes_no_untied_one(compare) -> None:
    untied = changed("model", {"untie_embeddings_and_output_weights": True})
    with pytest.raises(UserError, match=r"differs from its word embedding.*pass --untie-embeddings"):
        compare(untied, CONFIG)
    assert "untie_embeddings_and_output_weights True (now False)" in compare(untied, finetuned(CONFIG))[0]


def test_a_window_comes_back_and_may_change_with_finetune(compare) -> None:
    window, other = (
        changed("model", {"window_size": (size, 0), "window_attn_skip_freq": (2,)}) for size in (8, 9)
    )
    assert compare(window, window) == []
    with pytest.raises(UserError, match=r"has another model: window_size 8 0 \(now 9 0\); use"):
        compare(window, other)
    assert "window_size 8 0 (now 9 0)" in compare(window, finetuned(other))[0]


def test_longer_samples_are_for_a_run_of_its_own_and_for_positions_without_a_table(compare) -> None:
    longer = {"seq_length": 2048}
    rope = changed("model", {"position_embedding_type": "rope"})
    assert "seq_length 1024 (now 2048)" in compare(rope, finetuned(changed("model", longer, rope)))[0]
    with pytest.raises(UserError, match=r"seq_length 1024 \(now 2048\); use the"):
        compare(rope, changed("model", longer, rope))
    with pytest.raises(UserError, match=r"max_position_embeddings 1024 \(now 2048\)"):
        compare(CONFIG, finetuned(changed("model", longer)))


def test_the_longest_context_of_an_export_is_free_without_a_table(compare) -> None:
    rope = changed("model", {"position_embedding_type": "rope"})
    assert compare(rope, changed("model", {"max_position_embeddings": 4096}, rope)) == []


def test_fields_that_one_version_does_not_know(compare, topology: Topology) -> None:
    model = json.loads(json.dumps(compatibility_record(CONFIG, topology)["model"]))
    with pytest.raises(UserError, match=r"has another model: num_ideas 8 \(now None\); use the"):
        compare(CONFIG, CONFIG, model=model | {"num_ideas": 8})
    del model["norm_epsilon"]  # of a time when it had no name, and the value that is now the default
    assert compare(CONFIG, CONFIG, model=model) == []


@pytest.mark.parametrize(
    "parts", [{"model": {"hidden_size": "wide"}}, {"model": {"num_attention_heads": 0}}, {"schedule": 3}]
)
def test_a_damaged_description_is_no_crash(compare, parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"run.json is damaged|has another model"):
        compare(CONFIG, CONFIG, **parts)


def test_a_longer_run_asks_which_decay_is_meant(compare) -> None:
    longer = changed("training", {"train_iters": 200})
    with pytest.raises(UserError) as caught:
        compare(CONFIG, longer)
    assert "has another schedule: lr_decay_iters 100 (now 200); pass --override" in str(caught.value)
    assert "without --lr-decay-iters the decay ends with the run, at --train-iters" in str(caught.value)
    (notice,) = compare(CONFIG, changed("optimizer", {"lr_decay_iters": 100}, longer))
    assert notice == f"changed since checkpoint {FOLDER}: train_iters 100 (now 200)"


def resuming(config: Config, **flags: bool) -> Config:
    return replace(config, checkpoint=CheckpointConfig(load="SAVE", **flags))


def test_the_flags_choose_one_of_two_schedules(compare, topology: Topology) -> None:
    rising = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1}
    saved = changed("optimizer", rising)
    here = changed("optimizer", {"lr": 1.0}, changed("training", {"train_iters": 200}, saved))
    description = compatibility_record(saved, topology)
    override = resuming(here, override_opt_param_scheduler=True)
    assert "the command line's schedule is used" in compare(saved, override)[0]
    assert resumed_config(description, override) == override
    keep = resuming(here, use_checkpoint_opt_param_scheduler=True)
    assert compare(saved, keep)[0].startswith("the checkpoint's schedule is kept: lr 0.0003 (not 1.0)")
    kept = resumed_config(description, keep)
    assert kept.training == here.training
    schedules = [OptimizerSchedules.of(each, topology.dp.size) for each in (kept, saved)]
    for at in (1, 50, 100, 150):
        assert schedules[0].learning_rate(at) == schedules[1].learning_rate(at)
        assert schedules[0].weight_decay(at) == schedules[1].weight_decay(at)
    assert compatibility_record(kept, topology)["schedule"] == description["schedule"]


def test_a_kept_schedule_with_two_rates_needs_the_flag(compare) -> None:
    """The optimizer has grouped its weights by the flag before the checkpoint is read."""
    saved = changed("optimizer", {"decoupled_lr": 1e-2})
    with pytest.raises(UserError, match=r"another schedule: decoupled_lr .*also pass --decoupled-lr 0\.01"):
        compare(saved, resuming(CONFIG, use_checkpoint_opt_param_scheduler=True))
    here = changed("optimizer", {"decoupled_lr": 1e-3})
    (notice,) = compare(saved, resuming(here, use_checkpoint_opt_param_scheduler=True))
    assert notice == "the checkpoint's schedule is kept: decoupled_lr 0.01 (not 0.001)"


def test_a_schedule_in_the_other_unit_can_only_be_replaced(compare) -> None:
    training = replace(CONFIG.training, train_iters=None, train_samples=800)
    here = replace(CONFIG, training=training)
    with pytest.raises(UserError, match="one counts iterations, the other samples: pass --override"):
        compare(CONFIG, resuming(here, use_checkpoint_opt_param_scheduler=True))
    assert "schedule is used" in compare(CONFIG, resuming(here, override_opt_param_scheduler=True))[0]


def test_without_the_optimizers_state_the_schedule_is_the_runs(compare) -> None:
    (notice,) = compare(CONFIG, resuming(changed("optimizer", {"lr": 1.0}), load_optim=False))
    assert notice == "the schedule differs from the checkpoint's: lr 0.0003 (now 1.0)"


def test_another_tokenizer_is_reported(compare) -> None:
    other = changed("data", {"tokenizer_type": "NullTokenizer"})
    for here in (other, finetuned(other)):
        assert "trained with another tokenizer" in compare(CONFIG, here)[-1]
    assert compare(CONFIG, changed("data", {"tokenizer_type": None})) == []


def test_a_converted_checkpoint_is_compared_in_what_it_has(compare) -> None:
    assert compare(CONFIG, CONFIG, run={}, schedule=None, data=None, settings=None, tokenizer=None) == []


Changes = dict[str, dict[str, Any]]
IN_SAMPLES: Changes = {"training": {"train_iters": None, "train_samples": 800}}
CONSTANT: Changes = {"optimizer": {"lr_decay_style": "constant"}}
RISING: Changes = {
    "optimizer": {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1}
}
BY_CONTEXT: list[tuple[str, Changes]] = [
    (
        " ".join(name for name in fields_by_name() if name.startswith(("mamba_", "mixer_"))),
        {"model": {"hybrid_override_pattern": "B*-M", "mamba_head_dim": 16, "add_bias_linear": False}},
    ),
    ("kv_shared_ffn_hidden_size", {"model": {"num_kv_shared_layers": 1}}),
    ("untie_embeddings_and_output_weights", {"model": {"untie_embeddings_and_output_weights": True}}),
    ("window_attn_skip_freq", {"model": {"window_size": (4, 0)}}),
    ("start_weight_decay end_weight_decay weight_decay_incr_iters", RISING),
    ("lr_decay_samples lr_warmup_samples", IN_SAMPLES),
    ("train_iters", CONSTANT),
    ("train_samples", IN_SAMPLES | CONSTANT),
    ("lr_wsd_decay_samples", {"optimizer": {"lr_decay_style": "WSD"}} | IN_SAMPLES),
    ("weight_decay_incr_samples", RISING | IN_SAMPLES),
    ("decoupled_min_lr", {"optimizer": {"decoupled_lr": 1e-2}}),
]
CONTEXT_OF = {name: context for names, context in BY_CONTEXT for name in names.split()}
"""What a field needs other fields to be to have an effect, besides the conditions that it declares."""
REFUSED_AS = {
    OnResume.MODEL: "has another model",
    OnResume.RUN: "belongs to another run",
    OnResume.SCHEDULE: "has another schedule",
    OnResume.SETTING: "has other settings",
    OnResume.DATA: "was trained on other data",
}


def another(field: ConfigField, value: Any) -> Any:
    """A value that the field does not have."""
    if field.kind.item is bool:
        return not value
    if field.kind.choices:
        values = [choice for choice in (*field.kind.choices, "other") if choice != value]
        return tuple(values[:1]) if field.kind.is_many else values[0]
    if field.kind.item is str:
        return ("other",) if field.kind.is_many else "other"
    if field.kind.is_many:
        return (2,) if field.name in ("no_rope_freq", "window_attn_skip_freq") else (2, 2, 8)
    return (value or 1) + 1 if field.kind.item is int else (value or 0) / 2 + 0.3


def with_effect(field: ConfigField, config: Config) -> Config:
    """Return the config with other fields changed so that the conditions of a field are met."""
    for condition in field.declared.only_with:
        is_any = isinstance(condition, AnyOf)
        needed = Setting(condition.fields[0]) if is_any else condition
        other = fields_by_name()[needed.field]
        value = getattr(getattr(config, other.group), other.name)
        if not needed.is_met(value):
            is_listed = isinstance(needed.values, tuple) and not isinstance(needed.values, Range)
            met = needed.values[0] if is_listed else another(other, value)
            config = changed(other.group, {other.name: met}, config)
        config = with_effect(other, config)
    return config


@pytest.mark.parametrize("field", config_fields(), ids=lambda field: field.name)
def test_every_field_is_treated_by_its_rule(compare, field: ConfigField) -> None:
    rule = field.on_resume
    saved = with_effect(field, CONFIG)
    for group, values in CONTEXT_OF.get(field.name, {}).items():
        saved = changed(group, values, saved)
    value = another(field, getattr(getattr(saved, field.group), field.name))
    here = changed(field.group, {field.name: value}, saved)
    if rule in REFUSED_AS:
        with pytest.raises(UserError, match=REFUSED_AS[rule]):
            compare(saved, here)
    elif rule in (OnResume.LOGGED, OnResume.CORPUS):
        assert any(field.name in notice for notice in compare(saved, here))
    elif rule is OnResume.FREE:
        assert compare(saved, here) == []
