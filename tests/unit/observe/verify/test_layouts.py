from dataclasses import replace
from typing import get_args

import pytest

from megalite.config import Config, DataConfig, ParallelConfig, RecomputeConfig, TrainingConfig
from megalite.config.config import layers_per_stage
from megalite.config.presets import PRESETS
from megalite.config.recompute import Granularity
from megalite.observe.verify.layouts import TABLE, Layout, default_layouts
from megalite.pipeline.schedules import SCHEDULES
from megalite.utils.errors import ConfigError, UserError


@pytest.mark.parametrize(
    ("name", "layout", "world_size"),
    [
        ("tp2", Layout({"tp": 2}), 2),
        ("tp2pp2dp2", Layout({"tp": 2, "pp": 2, "dp": 2}), 8),
        ("dp4mbs2", Layout({"dp": 4}, mbs=2), 4),
        ("mbs4", Layout(mbs=4), 1),
        ("tp2+sp", Layout({"tp": 2}, switches=("sp",)), 2),
        ("tp2pp2mbs4+sp", Layout({"tp": 2, "pp": 2}, mbs=4, switches=("sp",)), 4),
        ("tp2pp2v2dp2", Layout({"tp": 2, "pp": 2, "dp": 2}, v=2), 8),
        ("tp2dp2+sp+zero1+gather", Layout({"tp": 2, "dp": 2}, switches=("sp", "zero1", "gather")), 4),
        ("dp4+zero2", Layout({"dp": 4}, switches=("zero2",)), 4),
        ("tp2cp2+sp+a2a", Layout({"tp": 2, "cp": 2}, switches=("sp", "a2a")), 4),
        (
            "tp2cp4+sp+full+a2a+p2p",
            Layout({"tp": 2, "cp": 4}, switches=("sp", "full", "a2a+p2p")),
            8,
        ),
        ("pp2+selective+uneven", Layout({"pp": 2}, switches=("selective", "uneven")), 2),
        ("pp4zb", Layout({"pp": 4}, schedule="zb"), 4),
        ("pp2gpipe", Layout({"pp": 2}, schedule="gpipe"), 2),
        ("tp1+full", Layout(switches=("full",)), 1),
        ("pp2zbvmbs1", Layout({"pp": 2}, schedule="zbv", mbs=1), 2),
    ],
)
def test_a_name_is_read_and_written_back(name: str, layout: Layout, world_size: int) -> None:
    assert Layout.parse(name) == layout
    assert str(layout) == name
    assert layout.world_size == world_size


@pytest.mark.parametrize(
    "name", ["", "tp", "tp0", "tp2x", "xp2", "2tp", "tp2 pp2", "tp2sp", "+sp", "tp2+", "tp2+zz"]
)
def test_another_name_is_a_mistake(name: str) -> None:
    with pytest.raises(UserError, match="write tp2pp2"):
        Layout.parse(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tp2tp4", "has both tp2 and tp4"),
        ("pp2v2zb", "has both v2 and zb"),
        ("dp2+zero1+zero3", r"has both \+zero1 and \+zero3"),
        ("cp4+p2p+a2a", r"has both \+p2p and \+a2a"),
        ("tp2zb", "has the schedule zb and no pipeline: write pp2zb"),
        ("dp2+sp", r"has \+sp without effect: write tp2 too"),
        ("tp2+a2a", r"has \+a2a without effect: write cp2 too"),
        ("tp2+allgather", r"has \+allgather without effect: write ep2 or etp2 too"),
    ],
)
def test_a_part_of_a_name_without_effect_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Layout.parse(name)


def _config() -> Config:
    return Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=100),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=2, train_iters=1),
    )


def test_a_layout_changes_nothing_but_the_layout() -> None:
    config = Layout({"tp": 2, "dp": 2}, mbs=1).apply(_config(), global_batch_size=8)
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
        Layout({"tp": 3}).apply(_config(), global_batch_size=8)


def test_a_balance_loss_of_a_microbatch_needs_its_size() -> None:
    fields = {"num_experts": 4, "add_bias_linear": False, "moe_router_load_balancing_type": "aux_loss"}
    config = _config()
    config = replace(config, model=replace(config.model, **fields))
    with pytest.raises(ConfigError, match="another micro-batch size trains another run"):
        Layout.parse("dp2mbs1").apply(config, 8)
    assert Layout.parse("dp2mbs2").apply(config, 8).training.micro_batch_size == 2


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


USUAL = [
    *("dp2", "mbs1", "tp2+sp", "tp2+overlap", "cp2", "cp2+p2p", "dp2+zero2", "dp4+zero2", "dp2+zero3"),
    *("pp2v2", "pp2zbv"),
]
ONE_RANK = ["tp1+full", "tp1+offload"]


@pytest.mark.parametrize("name", ["gpt-tiny", "bloom-tiny", "bert-tiny", "llama-tiny"])
def test_every_small_model_runs_all_default_layouts(name: str) -> None:
    config = replace(_config(), model=replace(PRESETS[name], vocab_size=100))
    assert [*map(str, default_layouts(config))] == ["tp4", "pp4", *USUAL, *ONE_RANK]


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (8, ["pp4", "pp2v2", "pp2zbv"]),
        (6, ["pp3", "pp2v3"]),
        (5, ["pp3+uneven"]),
        (2, ["pp2"]),
        (1, []),
    ],
)
def test_a_default_layout_has_a_stage_between_the_first_and_the_last(
    num_layers: int, expected: list[str]
) -> None:
    config = replace(_config(), model=replace(_config().model, num_layers=num_layers))
    assert [name for name in map(str, default_layouts(config)) if name.startswith("pp")] == expected


def test_default_layouts_that_the_config_cannot_run_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(_config(), model=replace(_config().model, hidden_size=48, num_attention_heads=3))
    with caplog.at_level("INFO", "megalite"):
        assert not [each for each in default_layouts(config) if each.size("tp") > 1]
    assert "not verified: layout tp2+sp: --num-attention-heads 3 is not divisible by --tp 2" in caplog.text


def test_default_layouts_differ_from_the_config_on_one_rank() -> None:
    recompute = RecomputeConfig(recompute_granularity="full", cpu_offload_activations=1)
    optimizer = replace(_config().optimizer, optimizer_cpu_offload=True)
    config = replace(
        _config(),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
        recompute=recompute,
        optimizer=optimizer,
    )
    names = [*map(str, default_layouts(config))]
    assert not set(names) & {"mbs1", *ONE_RANK}
    assert "mbs2" in names


def test_nccl_needs_a_gpu_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = replace(_config(), parallel=ParallelConfig(distributed_backend="nccl"))
    assert [*map(str, default_layouts(config))][:2] == ["tp2", "pp2"]


def test_a_config_that_runs_no_default_layout_is_refused() -> None:
    sizes = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 3, "seq_length": 15}
    model = replace(_config().model, **sizes)
    training = TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1)
    recompute = RecomputeConfig(recompute_granularity="full", cpu_offload_activations=1)
    optimizer = replace(_config().optimizer, optimizer_cpu_offload=True)
    config = replace(_config(), model=model, training=training, recompute=recompute, optimizer=optimizer)
    with pytest.raises(ConfigError, match="layout mbs2: --global-batch-size 1"):
        default_layouts(config)
