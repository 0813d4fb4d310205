"""Losses, texts and answers to lm-evaluation-harness are the same on ranks of tp, pp, cp and dp."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.data.tokenizers.tokenizer import ByteTokenizer
from megalite.distributed.topology import Topology
from megalite.generate.benchmark_tasks import HarnessModel
from megalite.generate.evaluate_text import WindowOptions, evaluate_texts
from megalite.generate.trained_model import CP_COMM_TYPE, ModelFlags, open_trained
from tests.checkpoint_folder import MemorySource
from tests.live_ranks import run_ranks
from tests.stages import build_stage

MODEL = replace(PRESETS["llama-tiny"], num_layers=3, vocab_size=257, params_dtype="fp64", init_method_std=0.3)
TEXTS = ("In the beginning", "God created the heaven and the earth." * 4)
WINDOWS = WindowOptions(seq_length=64, stride=32, batch_size=2)


def write_checkpoint(topology: Topology, folder: Path, model: ModelConfig = MODEL) -> None:
    stage = build_stage(model, topology, range(model.num_layers), seed=3)
    MemorySource.of(stage).save(folder)


def answers(
    topology: Topology, folder: Path, parallel: ParallelConfig
) -> tuple[list[tuple[float, bool]], list[float], list[str], list[float]]:
    trained = open_trained(ModelFlags(folder, None, None, parallel, None), topology)
    model = HarnessModel(trained, ByteTokenizer(), 2, topology)
    pairs = [("In the ", "beginning"), ("a", "bc"), ("And the earth", " was"), ("x" * 80, "y"), ("b", "a")]
    options = {"max_gen_toks": 5, "do_sample": True, "temperature": 0.9}

    def requests(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
        return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]  # type: ignore[arg-type]

    return (
        model.loglikelihood(requests("loglikelihood", [*pairs])),
        model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text, _ in pairs])),
        model.generate_until(requests("generate_until", [(text, options) for text, _ in pairs])),
        losses_of_texts(topology, folder, parallel),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    run_ranks(write_checkpoint, ParallelConfig().mesh, 1, folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> tuple[Any, ...]:
    """The answers of one rank."""
    (found,) = run_ranks(answers, ParallelConfig().mesh, 1, checkpoint, ParallelConfig())
    return found


EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": 0.5},
        {"softmax_type": "learnable"},
        EXPERTS,
        {"z_loss_coeff": 0.1, "mtp_num_layers": 1},
    ],
    ids=["caps", "sinks", "experts", "terms"],
)
def test_a_text_has_the_loss_of_its_tokens(
    changes: dict[str, Any], tmp_path: Path, one_rank: Topology
) -> None:
    """Two ways to one number: attention to whole windows, and to the keys in a cache."""
    write_checkpoint(one_rank, tmp_path / "run", replace(MODEL, **changes))
    trained = open_trained(ModelFlags(tmp_path / "run", None, None, ParallelConfig(), None), one_rank)
    model, text = HarnessModel(trained, ByteTokenizer(), 2, one_rank), TEXTS[0]
    ((value, _),) = model.scores([([ByteTokenizer().eod], [*text.encode()])])
    (result,) = evaluate_texts(trained, {"": text}, ByteTokenizer(), WINDOWS, one_rank)
    assert result.loss == pytest.approx(-value / len(text), rel=1e-11)


def losses_of_texts(topology: Topology, folder: Path, parallel: ParallelConfig) -> list[float]:
    trained = open_trained(ModelFlags(folder, None, None, parallel, None), topology)
    results = evaluate_texts(trained, {text[:5]: text for text in TEXTS}, ByteTokenizer(), WINDOWS, topology)
    return [each.loss for each in results]


@pytest.mark.parametrize("parallel", [{"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}])
def test_experts_have_the_same_loss_in_any_layout(
    parallel: dict[str, Any], tmp_path: Path, one_rank: Topology
) -> None:
    """Their routers compute terms of the loss in training, on each stage."""
    write_checkpoint(one_rank, tmp_path / "run", replace(MODEL, **EXPERTS))
    losses = losses_of_texts(one_rank, tmp_path / "run", ParallelConfig())
    config = ParallelConfig(**parallel, cp_comm_type=CP_COMM_TYPE)
    for found in run_ranks(losses_of_texts, config.mesh, 2, tmp_path / "run", config):
        assert found == pytest.approx(losses, rel=1e-11)


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "num_ranks"),
    [
        *((1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)),
        *(pytest.param(2, 2, cp, 8, marks=pytest.mark.slow) for cp in (1, 2)),
        pytest.param(1, 1, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_same_answers_in_any_layout(
    tp: int, pp: int, cp: int, num_ranks: int, checkpoint: Path, expected: tuple[Any, ...]
) -> None:
    pairs, sums, texts, losses = expected
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        cp_comm_type=CP_COMM_TYPE,
    )
    for found in run_ranks(answers, parallel.mesh, num_ranks, checkpoint, parallel):
        assert [value for value, _ in found[0]] == pytest.approx([value for value, _ in pairs], rel=1e-11)
        assert [is_best for _, is_best in found[0]] == [is_best for _, is_best in pairs]
        assert found[1] == pytest.approx(sums, rel=1e-11)
        assert found[2] == texts
        assert found[3] == pytest.approx(losses, rel=1e-11)
