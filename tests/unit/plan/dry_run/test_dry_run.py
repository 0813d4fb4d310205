"""A dry run from its command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megalite.cli.train import pretrain
from megalite.config.validate import problems_of
from megalite.frontends.command_line import parse
from megalite.model.transformer_stage import GPT
from megalite.pipeline.schedules import SCHEDULES
from megalite.plan.dry_run.dry_run import dry_run, summarize_actions
from megalite.plan.units import whole_model
from megalite.utils.errors import ConfigError, UserError
from tests.unit.frontends.megatron.lines import example_scripts

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 1000 --mock-data"
)
RUN = "--dry-run --train-iters 20 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 4 --micro-batch-size 2"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def run(line: str) -> None:
    dry_run(*parse(shlex.split(line)))


def object_of(line: str, folder: Path) -> dict[str, object]:
    path = folder / "dry.json"
    run(f"{line} --dry-run-json {path}")
    return json.loads(path.read_text())


class OwnModel(GPT):
    """A model of a program's own."""


def test_a_model_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    """What a real run checks after its first iteration needs values."""
    dry_run(*parse(shlex.split(f"{MODEL} {RUN} --tp 2 --pp 2 --world-size 8")), OwnModel)
    assert "dry run of rank 0 of 8" in capsys.readouterr().out


def test_a_rank_of_a_large_world(tmp_path: Path) -> None:
    layout = "--tp 8 --pp 4 --global-batch-size 1024 --bf16 --use-distributed-optimizer"
    found = object_of(f"{MODEL} {RUN} {layout} --world-size 4096 --rank 1234", tmp_path)
    assert found["world_size"] == 4096
    assert found["axes"] == {
        "pp": {"rank": 1, "size": 4},
        "dp": {"rank": 26, "size": 128},
        "tp": {"rank": 2, "size": 8},
    }
    assert found["schedule"]["peak_in_flight"] == 3
    assert len(found["schedule"]["actions"]) == 2 * 4
    assert found["schedule"]["actions"][:3] == ["forward 0", "forward 1", "forward 2"]
    assert found["iterations"] == 20
    assert found["consumed_samples"] == 20 * 1024
    assert found["consumed_tokens"] == 20 * 1024 * 32
    assert found["learning_rate"] == {"first": pytest.approx(2.5e-4), "last": pytest.approx(1e-4)}
    messages = [call for call in found["collectives"] if call["kind"] == "send"]
    hidden = 32 * 2 * 64 * 2
    assert messages == [{"axis": "pp", "kind": "send", "dtype": "bfloat16", "num_bytes": hidden, "count": 8}]
    buffers = found["buffer_bytes"]
    assert buffers["total"] == sum(size for name, size in buffers.items() if name != "total")
    assert buffers["gradients"] == 2 * buffers["weights"]
    assert 128 * buffers["moments"] == 4 * buffers["weights"]
    assert sum(found["peak_bytes_by_part"].values()) == found["peak_bytes"]
    assert {"layernorm", "core_attn", "mlp_act"} <= found["peak_bytes_by_part"].keys()


def test_a_7b_models_state_in_a_file_leaves_little_in_host_memory(tmp_path: Path) -> None:
    """No folder is needed: the plan is made before there is a machine."""
    model = "--mock-data --preset llama2-7b --num-layers 2 --bf16 --attention-dropout 0"
    found = object_of(f"{model} {RUN} --global-batch-size 8 --optimizer-nvme-offload /no/such/disk", tmp_path)
    buffers, offload = found["buffer_bytes"], found["offload_bytes"]
    assert (buffers["main_weights"], buffers["moments"]) == (0, 0)
    assert offload["file"] == pytest.approx(6 * buffers["weights"], rel=1e-3)
    assert offload["read"] == offload["written"] == 6 * buffers["weights"]
    assert (offload["down"], offload["up"]) == (2 * buffers["weights"], buffers["weights"])
    assert offload["host"] < 0.3e9


def test_megatrons_example_of_llama_in_two_layers(tmp_path: Path) -> None:
    script = example_scripts()["NVIDIA/Megatron-LM/examples/llama/train_llama3_8b_h100_fp8.sh"]
    flags = shlex.join(script.flags)
    found = object_of(f"{flags} --num-layers 2 --dry-run --world-size 8", tmp_path)
    assert found["decoupled_learning_rate"] == {
        "first": pytest.approx(5e-4 * 128 / 3_906_252),
        "last": pytest.approx(4.5e-5),
    }


DEEPSEEK = "NVIDIA/Megatron-LM/examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh"
NO_CORPUS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 129280"


def test_megatrons_example_of_deepseek_in_five_layers(tmp_path: Path) -> None:
    """Dense layers, layers with experts, and the module of multi-token prediction."""
    flags = shlex.join(example_scripts()[DEEPSEEK].flags)
    layers = "--num-layers 5 --moe-layer-freq [0]*3+[1]*2"
    found = object_of(f"{flags} --override-flags {layers} {NO_CORPUS} --dry-run --world-size 256", tmp_path)
    buffers = found["buffer_bytes"]
    assert buffers["weights"] == 0  # stage 3 keeps its part of the main weights alone
    assert {call["axis"] for call in found["collectives"]} == {"dp", "edp", "ep"}
    sent = {call["kind"] for call in found["collectives"] if call["axis"] == "ep"}
    assert sent == {"all-to-all"}


def test_megatrons_example_of_deepseek_has_the_published_parameters() -> None:
    line = f"{shlex.join(example_scripts()[DEEPSEEK].flags)} --override-flags {NO_CORPUS} --mtp-num-layers 0"
    config, _ = parse(shlex.split(line))
    assert whole_model(config.model, 1).num_parameters == 671_026_404_352


def test_the_report_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{MODEL} {RUN} --tp 2 --pp 2 --global-batch-size 16 --rank 3")
    text = capsys.readouterr().out
    for words in (
        "dry run of rank 3 of 4: pp 1 of 2, dp 0 of 1, tp 1 of 2",
        "8 microbatches, at most 1 in flight",
        "8 x (forward, backward)",
        "data skipped: --mock-data reads no corpus",
        "the run: 20 iterations, 320 samples, 10,240 tokens",
        "learning rate: 0.00025 at the first iteration, 0.0001 at the last",
    ):
        assert words in text, text


def test_it_leaves_no_process_group_and_no_meta_implementation_behind() -> None:
    import torch
    import torch.distributed as dist

    run(f"{MODEL} {RUN} --pp 2")
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError):
        torch.empty((), device="meta").item()


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("--rank 4 --tp 2", 4, "--rank 4 is not one of 4 ranks: pass 0 to 3"),
        ("--dry-run-json /no/such/folder/f.json", 1, "there is no folder /no/such/folder"),
        ("--tp 8 --pp 4", 48, "48"),
    ],
)
def test_what_it_refuses(flags: str, world_size: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(f"{MODEL} {RUN} {flags} --world-size {world_size}")
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("flag", ["--dry-run", "--verify-layouts tp2"])
def test_a_launcher_of_many_ranks_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    name = flag.split()[0]
    with pytest.raises(UserError, match=f"{name} is one process, but the launcher has started 4"):
        pretrain(arguments=shlex.split(f"{MODEL} --mock-data --train-iters 2 --lr 1e-3 {flag}"))


def test_its_options_do_nothing_without_it() -> None:
    config, notices = parse(shlex.split(f"{MODEL} --train-iters 2 --lr 1e-3 --rank 1 --world-size 8"))
    assert not problems_of(config, 1)
    text = " ".join(notices)
    assert "--rank 1 has no effect" in text
    assert "--world-size 8 has no effect" in text


@pytest.mark.parametrize(
    ("schedule", "rank", "words"),
    [
        ("1f1b", 0, "4 x forward, 2 x (backward, forward), 4 x backward"),
        ("1f1b", 3, "6 x (forward, backward)"),
        ("gpipe", 1, "6 x forward, 6 x backward"),
    ],
)
def test_repeated_actions_are_counted(schedule: str, rank: int, words: str) -> None:
    stages = SCHEDULES[schedule].stage_map(4)
    assert summarize_actions(SCHEDULES[schedule].train(rank, stages, 6)) == words


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipev"])
def test_a_steady_state_takes_no_more_words_for_more_microbatches(schedule: str) -> None:
    stages = SCHEDULES[schedule].stage_map(4)
    few, many = (summarize_actions(SCHEDULES[schedule].train(1, stages, count)) for count in (32, 64))
    assert len(few) == len(many)
    assert few != many
