from dataclasses import replace
from typing import get_args

import pytest

from megalite.config import Config, DataConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.config.recompute import Granularity
from megalite.config.stage_layers import layers_per_stage
from megalite.errors import ConfigError, UserError
from megalite.pipeline.schedules import SCHEDULES
from megalite.verify.layouts import TABLE, Layout


@pytest.mark.parametrize(
    ("name", "layout", "world_size"),
    [
        ("tp2", Layout(tp=2), 2),
        ("tp2pp2dp2", Layout(2, 2, 2), 8),
        ("dp4mbs2", Layout(dp=4, mbs=2), 4),
        ("mbs4", Layout(mbs=4), 1),
        ("tp2+sp", Layout(tp=2, sp=True), 2),
        ("tp2pp2mbs4+sp", Layout(tp=2, pp=2, mbs=4, sp=True), 4),
        ("tp2pp2v2dp2", Layout(2, 2, 2, v=2), 8),
        ("tp2dp2+sp+zero1+gather", Layout(tp=2, dp=2, sp=True, zero=1, gather=True), 4),
        ("dp4+zero2", Layout(dp=4, zero=2), 4),
        ("pp2+selective+uneven", Layout(pp=2, recompute="selective", uneven=True), 2),
        ("pp4zb", Layout(pp=4, schedule="zb"), 4),
        ("pp2gpipe", Layout(pp=2, schedule="gpipe"), 2),
        ("pp2zbvmbs1", Layout(pp=2, schedule="zbv", mbs=1), 2),
    ],
)
def test_a_name_is_read_and_written_back(name: str, layout: Layout, world_size: int) -> None:
    assert Layout.parse(name) == layout
    assert str(layout) == name
    assert layout.world_size == world_size


@pytest.mark.parametrize(
    "name", ["", "tp", "tp0", "tp2x", "cp2", "2tp", "tp2 pp2", "tp2sp", "+sp", "tp2+", "tp2+zz"]
)
def test_another_name_is_a_mistake(name: str) -> None:
    with pytest.raises(UserError, match="write tp2pp2"):
        Layout.parse(name)


def _config() -> Config:
    return Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=100),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=2, train_iters=1),
    )


def test_a_layout_changes_nothing_but_the_layout() -> None:
    config = Layout(tp=2, dp=2, mbs=1).apply(_config(), global_batch_size=8)
    assert (config.parallel.tp, config.parallel.pp, config.parallel.data_parallel_size) == (2, 1, 2)
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (1, 8)
    assert (config.model, config.optimizer, config.data) == (
        _config().model,
        _config().optimizer,
        _config().data,
    )


def test_a_name_without_gather_leaves_it_to_the_device() -> None:
    chosen = [Layout.parse(f"dp2+zero1{name}").apply(_config(), 8).parallel for name in ("", "+gather")]
    assert [each.overlap_param_gather for each in chosen] == [None, True]


def test_recomputation_and_an_uneven_split_are_of_the_layout() -> None:
    config = Layout.parse("pp2+full+uneven").apply(_config(), global_batch_size=8)
    assert config.recompute.recompute_granularity == "full"
    assert layers_per_stage(config) == (1, 3)


def test_a_layout_that_the_model_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="--num-attention-heads 4 is not divisible by --tp 3"):
        Layout(tp=3).apply(_config(), global_batch_size=8)


def test_the_table_has_every_technique() -> None:
    """`--layouts all` and the tests that always run use this table."""
    configs = [Layout.parse(name).apply(_config(), 8) for name in TABLE]
    assert {each.parallel.pipeline_schedule for each in configs} == set(SCHEDULES)
    assert {each.parallel.zero_stage for each in configs} == {0, 1, 2, 3}
    assert {each.recompute.recompute_granularity for each in configs} == {None, *get_args(Granularity)}
    assert any(each.parallel.sequence_parallel for each in configs)
    assert any(each.parallel.overlap_param_gather for each in configs)
    assert any(each.training.micro_batch_size != _config().training.micro_batch_size for each in configs)
    assert any(len(set(layers_per_stage(each))) > 1 for each in configs)
