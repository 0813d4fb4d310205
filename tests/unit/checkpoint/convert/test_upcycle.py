"""A model with experts from a dense checkpoint computes what the dense model computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.convert.formats import MegaliteSource
from megalite.checkpoint.convert.model_settings import Settings
from megalite.checkpoint.convert.upcycle import ExpertSizes, upcycle
from megalite.cli.checkpoints import upcycle as main
from megalite.config import ModelConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.model.experts import Router, Routing
from megalite.model.stage import Stage
from megalite.utils.errors import UserError
from tests.stages import build_stage
from tests.unit.checkpoint.convert.test_convert import PeakBytes, save_stage, stage_of

IDS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(1))


def logits_of(stage: Stage) -> Tensor:
    with torch.no_grad():
        batch = Microbatch.of(IDS, torch.arange(3))
        return stage.logits(stage.hidden_states(batch, None))[..., : stage.vocab_size]


def loaded(folder: Path, one_rank: Topology) -> Stage:
    source = MegaliteSource(folder, None, Settings())
    model = source.config.model
    stage = build_stage(model, one_rank, range(model.num_layers)).eval()
    for name, parameter in stage.named_parameters():
        full = source.tensor(name)
        parameter.data[: len(full)].copy_(full)
    return stage


def routers_of(stage: Stage) -> list[Router]:
    return [module for module in stage.modules() if isinstance(module, Router)]


def upcycled(sizes: ExpertSizes, dense: Stage, folder: Path, one_rank: Topology) -> Stage:
    save_stage(dense, folder / "dense")
    upcycle(folder / "dense", sizes, folder / "experts", seed=1)
    return loaded(folder / "experts", one_rank)


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_equal_weights_are_bitwise_the_dense_model(topk: int, tmp_path: Path, one_rank: Topology) -> None:
    """The GEMMs get the same rows, because all tokens have the same experts."""
    dense = stage_of("llama", one_rank)
    stage = upcycled(ExpertSizes(4, topk), dense, tmp_path, one_rank)
    for router in routers_of(stage):
        router.weight.data.zero_()
    assert torch.equal(logits_of(stage), logits_of(dense))


def test_one_copy_per_token_is_the_dense_model_up_to_the_gemms(tmp_path: Path, one_rank: Topology) -> None:
    """A token's weight is exactly 1, but an expert's GEMM has fewer rows."""
    dense = stage_of("llama", one_rank)
    stage = upcycled(ExpertSizes(4, topk=1), dense, tmp_path, one_rank)
    used: dict[Router, set[int]] = {router: set() for router in routers_of(stage)}

    def note(router: Router, _: object, routing: Routing) -> None:
        assert (routing.weights == 1.0).all()
        used[router].update(routing.experts.flatten().tolist())

    for router in used:
        router.register_forward_hook(note)
    torch.testing.assert_close(logits_of(stage), logits_of(dense), rtol=1e-5, atol=1e-5)
    assert min(map(len, used.values())) > 1


@pytest.mark.parametrize(
    ("sizes", "activation"),
    [
        (ExpertSizes(4, topk=2), "swiglu"),
        (ExpertSizes(8, topk=2, granularity=2), "swiglu"),
        (ExpertSizes(9, topk=6, granularity=3), "squared_relu"),
        (ExpertSizes(4, topk=4, granularity=4), "gelu"),
    ],
)
def test_slices_and_several_copies_are_the_dense_model_to_rounding(
    sizes: ExpertSizes, activation: str, tmp_path: Path, one_rank: Topology
) -> None:
    config = dataclasses.replace(
        stage_of("llama", one_rank, "fp64").config,
        activation=activation,
        ffn_hidden_size=24,
        mtp_num_layers=1,
    )
    dense = build_stage(config, one_rank, range(2), seed=3).eval()
    save_stage(dense, tmp_path / "dense")
    flags = ["--num-experts", sizes.num_experts, "--moe-router-topk", sizes.topk]
    flags += ["--granularity", sizes.granularity]
    folders = ["--load", tmp_path / "dense", "--save", tmp_path / "experts"]
    main([*map(str, [*flags, *folders])])
    stage = loaded(tmp_path / "experts", one_rank)
    assert stage.config.moe_ffn_hidden_size == 24 // sizes.granularity
    torch.testing.assert_close(logits_of(stage), logits_of(dense), rtol=1e-13, atol=1e-13)
    for router in routers_of(stage):
        copies = router.weight.unflatten(0, (-1, sizes.granularity))
        assert (copies == copies[:, :1]).all() and len(copies[:, 0].unique(dim=0)) == len(copies)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, one_rank: Topology) -> None:
    save_stage(stage_of("llama", one_rank), tmp_path / "dense")
    with PeakBytes() as memory:
        upcycle(tmp_path / "dense", ExpertSizes(16), tmp_path / "experts", seed=1)
    source = MegaliteSource(tmp_path / "experts", None, Settings())
    layer = sum(source.tensor(f"layers.0.mlp.{name}.weight").nbytes for name in ("up", "down"))
    whole = sum(file.stat().st_size for file in (tmp_path / "experts").rglob("*.safetensors"))
    assert layer < memory.peak < 0.8 * whole


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"num_experts": 4}, ExpertSizes(4), "has 4 experts already"),
        ({"add_bias_linear": True}, ExpertSizes(4), "MLPs have biases"),
        ({"architecture": "bert"}, ExpertSizes(4), "is a bert"),
        ({"hybrid_override_pattern": "*-"}, ExpertSizes(4), "layers differ in their MLPs"),
        (
            {"ffn_hidden_size": 24},
            ExpertSizes(10, 5, 5),
            "--granularity 5 does not divide the MLP's width 24",
        ),
        ({"ffn_hidden_size": 24}, ExpertSizes(6, 4, 4), "--num-experts 6 .* --granularity 4.*pass 8"),
        ({"ffn_hidden_size": 24}, ExpertSizes(8, 2, 4), "--moe-router-topk 2 .* --granularity 4.*pass 4"),
    ],
)
def test_experts_that_cannot_replace_the_mlp(
    changes: dict[str, object], sizes: ExpertSizes, message: str, one_rank: Topology
) -> None:
    model: ModelConfig = dataclasses.replace(stage_of("llama", one_rank).config, **changes)
    with pytest.raises(UserError, match=message):
        sizes.check(model)
