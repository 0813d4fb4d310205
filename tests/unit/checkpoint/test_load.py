"""Which of a checkpoint's tensors a run reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.compatibility import compatibility_record
from megalite.checkpoint.load import LoadPlan, plan_load
from megalite.checkpoint.manifest import FORMAT, Manifest, TensorRecord
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import CheckpointConfig, Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.utils.errors import UserError

PROGRESS = TrainingProgress(10, 80)
WORD, OUTPUT = "embedding.word.weight", "output.weight"
SCALER = ("optimizer.loss_scaler.scale",)


@pytest.fixture
def topology() -> Iterator[Topology]:
    with Topology.fake(ParallelConfig().mesh, 1, 0) as topology:
        yield topology


def config_of(dtype: str, *, untied: bool = False, **flags: bool) -> Config:
    return Config(
        model=ModelConfig(vocab_size=256, params_dtype=dtype, untie_embeddings_and_output_weights=untied),  # type: ignore[arg-type]
        training=TrainingConfig(train_iters=100, global_batch_size=8),
        checkpoint=CheckpointConfig(load="SAVE", allow_settings_change=True, **flags),
    )


def names_of(config: Config) -> list[str]:
    """All that a run holds; of the parameters, the two that matter here."""
    parameters = [WORD, *([OUTPUT] if config.model.untie_embeddings_and_output_weights else [])]
    dtype = config.model.params_dtype
    kinds = ["exp_avg", "exp_avg_sq", *(["main"] if dtype in ("bf16", "fp16") else [])]
    state = [f"optimizer.{name}.{kind}" for name in parameters for kind in kinds]
    scaler = SCALER if dtype == "fp16" and config.optimizer.loss_scale is None else ()
    return [*(f"model.{name}" for name in parameters), *state, "optimizer.num_steps", *scaler]


def is_plain(name: str) -> bool:
    return name in ("optimizer.num_steps", *SCALER)


def manifest_of(config: Config, topology: Topology, *more: str, without: str = "-") -> Manifest:
    place = ParameterRange((2,), (0,), (2,), 0, 2)
    names = [name for name in names_of(config) if not name.startswith(without)]
    tensors = {
        name: (TensorRecord("f.safetensors", "float32", None if is_plain(name) or name in more else place),)
        for name in (*names, *more)
    }
    description = {"format": FORMAT, "progress": asdict(PROGRESS), **compatibility_record(config, topology)}
    return Manifest(Path("SAVE/iter_0000010"), json.loads(json.dumps(description)), "", tensors, {})


@pytest.fixture
def take(topology: Topology):
    def take(saved: Config, here: Config, *more: str, without: str = "-") -> LoadPlan:
        part = ParameterShard(torch.zeros(2), 0, (2,), ParameterSpec((2,)), is_replicated=True)
        wanted = {name: torch.zeros(()) if is_plain(name) else part for name in names_of(here)}
        return plan_load(manifest_of(saved, topology, *more, without=without), wanted, here, topology)

    return take


def renamed(plan: LoadPlan) -> dict[str, str]:
    """What is read from another name than its own."""
    return {name: source for name, source in plan.sources.items() if name != source}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_that_goes_on_takes_everything(take, dtype: str) -> None:
    config = config_of(dtype)
    plan = take(config, config)
    assert plan == LoadPlan(
        plan.folder, PROGRESS, {name: name for name in names_of(config)}, config, callbacks={}
    )


MODEL, MAIN = f"model.{WORD}", f"optimizer.{WORD}.main"


@pytest.mark.parametrize(
    ("before", "after", "others"),
    [
        ("fp32", "bf16", {MAIN: MODEL}),
        ("bf16", "fp32", {MODEL: MAIN}),
        ("bf16", "fp16", {MODEL: MAIN}),
        ("fp64", "fp32", {}),
        ("fp64", "fp16", {MAIN: MODEL}),
    ],
)
def test_another_precision_starts_from_the_finest_weights(
    take, before: str, after: str, others: dict[str, str]
) -> None:
    plan = take(config_of(before), config_of(after))
    assert renamed(plan) == others
    assert set(plan.sources) == set(names_of(config_of(after))) - set(SCALER)
    assert (plan.notices[1:] != ()) is ("fp16" in (before, after))


def test_a_loss_scale_comes_and_goes_with_a_notice(take) -> None:
    assert "it starts at --initial-loss-scale" in take(config_of("bf16"), config_of("fp16")).notices[-1]
    assert "is not used" in take(config_of("fp16"), config_of("bf16")).notices[-1]
    constant = config_of("fp16")
    constant = replace(constant, optimizer=replace(constant.optimizer, loss_scale=1024.0))
    assert "is not used" in take(config_of("fp16"), constant).notices[-1]


@pytest.mark.parametrize("flags", [{"finetune": True}, {"load_optim": False}])
def test_weights_alone(take, flags: dict[str, Any]) -> None:
    for saved in (config_of("fp16"), config_of("fp16", **{"save_optim": False})):
        without = "-" if saved.checkpoint.save_optim else "optimizer."
        plan = take(saved, config_of("fp16", **flags), without=without)
        assert plan.sources == {MODEL: MODEL, MAIN: MODEL if without == "optimizer." else MAIN}
        assert plan.progress == (TrainingProgress() if "finetune" in flags else PROGRESS)
        assert len(plan.notices) == (0 if "finetune" in flags else 1)


def test_weights_of_more_layers_than_run_json_says_are_refused(take) -> None:
    config = config_of("fp32")
    layers = config.model.num_layers
    with pytest.raises(
        ValueError, match=rf"num_layers {layers}, but there are weights of {layers + 2} layers"
    ):
        take(config, config, f"model.layers.{layers + 1}.mlp.up.weight")


def test_a_checkpoint_without_state_says_what_to_give(take) -> None:
    with pytest.raises(UserError, match=r"has no optimizer state .*: pass --no-load-optim .* or --finetune"):
        take(config_of("bf16"), config_of("bf16"), without="optimizer.")


@pytest.mark.parametrize("flags", [{}, {"finetune": True}])
def test_an_output_weight_of_its_own_starts_as_the_word_table(take, flags: dict[str, Any]) -> None:
    here = config_of("bf16", untied=True, **flags)
    plan = take(config_of("bf16"), here)
    expected = {name: name.replace(OUTPUT, WORD) for name in plan.sources if OUTPUT in name}
    assert renamed(plan) == expected
    assert len(expected) == (2 if flags else 4)
    assert "starts as the word embedding" in plan.notices[-1]


def test_a_tied_model_drops_the_output_weight_with_finetune_alone(take) -> None:
    untied = config_of("bf16", untied=True)
    with pytest.raises(UserError, match="or --finetune to drop it"):
        take(untied, config_of("bf16"))
    assert renamed(take(untied, config_of("bf16", finetune=True))) == {}


def test_state_that_has_no_place_here_is_named(take) -> None:
    for flags in ({}, {"finetune": True}):
        with pytest.raises(UserError, match="has tensors that this run does not have: more;"):
            take(config_of("fp32"), config_of("fp32", **flags), "more")
