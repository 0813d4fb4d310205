"""Judgements of torchtitan 0.2 or 0.3: as it is, with an error of its own, and with one that is injected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.distributed.local_ranks import LocalRanks
from megalite.observe.judge.judge import ProgramJudge, Verdict
from megalite.observe.judge.rank_record import Task, import_adapter
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.slow
IS_0_2 = metadata.version("torchtitan").startswith("0.2.")

LLAMA = with_fields(
    Config(),
    **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "seq_length": 16},
    **{
        "vocab_size": 128,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
    },
    **{"activation": "swiglu", "ffn_hidden_size": 32, "add_bias_linear": False, "hidden_dropout": 0.0},
    **{"attention_dropout": 0.0, "untie_embeddings_and_output_weights": True, "lr_decay_style": "constant"},
    **{"weight_decay": 0.0, "mock_data": True, "train_iters": 2},  # it decays norms too, unlike megalite
    **{"global_batch_size": 4, "micro_batch_size": 1},
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks() as ranks:
        yield ranks


def _judged(ranks: LocalRanks, program: str, layouts: str, config: Config, folder: Path | None) -> Verdict:
    samples = torch.zeros(2, 4, 17, dtype=torch.long)  # megalite's model draws them
    judge = ProgramJudge(import_adapter(program), Task(program, Layout(), config, {}, samples), ranks, folder)
    return judge.run([Layout.parse(name) for name in layouts.split(",")])


def test_layouts_and_resumes_agree(ranks: LocalRanks, tmp_path: Path) -> None:
    verdict = _judged(ranks, "torchtitan", "dp2,cp2,tp2+full", LLAMA, tmp_path)
    assert {"megalite", "dp2", "cp2", "tp2+full", "dp2 -> cp2"} <= set(verdict.same)
    assert not verdict.different and not verdict.refused


def test_its_own_error_is_found_in_the_version_that_has_it(ranks: LocalRanks) -> None:
    verdict = _judged(ranks, "torchtitan", "pp2", LLAMA, None)
    if IS_0_2:  # a pipeline does not divide the gradients by the tokens of the batch
        assert "is 64 " in " ".join(verdict.different["pp2"])
    else:
        assert "pp2" in verdict.same


def test_an_injected_error_is_found(ranks: LocalRanks) -> None:
    program = str(Path(__file__).with_name("wrong_torchtitan.py"))
    findings = " ".join(_judged(ranks, program, "dp2", LLAMA, None).different["dp2"])
    assert "is 0.5 (1/dp" in findings  # torchtitan sums, and FSDP averages by default


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"add_qkv_bias": True}, "torchtitan has no qwen2"),
        ({"optimizer": "muon"}, "optimizer muon is not judged"),
    ],
)
def test_what_it_lacks_is_named(changes: dict[str, object], error: str) -> None:
    adapter = import_adapter("torchtitan")
    with pytest.raises(UserError, match=error):
        adapter.build(Layout(), with_fields(LLAMA, **changes), {})


@pytest.mark.parametrize("layout", ["dp2+zero1", "tp2+uneven", "dp2tp2shard1" if IS_0_2 else "dp2ep2etp2"])
def test_layouts_that_it_lacks_are_named(layout: str) -> None:
    adapter = import_adapter("torchtitan")
    with pytest.raises(UserError, match="torchtitan"):
        adapter.build(Layout.parse(layout), LLAMA, {})
