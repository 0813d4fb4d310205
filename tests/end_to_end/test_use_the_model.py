"""A run's checkpoint at work: tools/generate.py and tools/evaluate.py, with nothing typed but its folder."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manifest import CONFIG
from megalite.cli.generate import evaluate, generate
from megalite.utils.commands import run_main
from megalite.utils.log import LineInterval
from tests.checkpoint_folder import reseal
from tests.end_to_end.conftest import TINY_FLAGS, status_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a tiny byte-level model; what was logged beside them."""
    folder = tmp_path_factory.mktemp("saved")
    flags = ("--save-interval", "2", "--eval-interval", "2", "--eval-iters", "2", "--micro-batch-size", "2")
    outputs = ("--save", str(folder / "checkpoints"), "--metrics-file", str(folder / "metrics.jsonl"))
    with redirect_stderr(io.StringIO()) as errors:
        status = status_of(*TINY_FLAGS, "--data-path", corpus, *flags, *outputs)
    assert (status, errors.getvalue()) == (0, "")
    return folder


@pytest.fixture
def trained(saved: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def validations(folder: Path) -> dict[tuple[str, int], float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["validation"] for line in lines if "validation" in line]
    return {(each["split"], each["iteration"]): each["lm_loss"] for each in found}


@pytest.fixture
def use(trained: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a tool on the checkpoints in this process; gives exit status, output and error lines."""

    def run(tool: Any, *flags: str) -> tuple[int, str, list[str]]:
        status = 0
        capsys.readouterr()
        try:
            run_main(tool, ["--load", str(trained / "checkpoints"), *flags])
        except SystemExit as end:
            status = int(end.code or 0)
        written = capsys.readouterr()
        return status, written.out, written.err.splitlines()

    return run


def test_a_split_has_the_loss_that_training_told(trained: Path, use: Any) -> None:
    logged = validations(trained)
    for split, iteration in (("valid", 2), ("valid", 4), ("test", 4)):
        flags = ("--split", split, "--load-iteration", str(iteration), "--json")
        status, output, _ = use(evaluate, *flags)
        assert status == 0
        assert json.loads(output)["loss"] == pytest.approx(logged[split, iteration], rel=1e-9)


def test_text_and_corpus(trained: Path, use: Any, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text as a file and in a corpus of the same tokens; windows with more context."""
    monkeypatch.setattr(LineInterval, "is_over", lambda self: True)
    text = trained / "text.txt"
    text.write_bytes(b"".join(f"document {i}: ".encode() * 20 for i in range(40)))
    _, output, _ = use(evaluate, "--text", str(text), "--json", "--micro-batch-size", "64")
    of_text = json.loads(output)
    assert of_text["num_tokens"] == text.stat().st_size
    assert of_text["bits_per_byte"] == pytest.approx(of_text["loss"] / math.log(2.0))
    assert of_text["perplexity"] == pytest.approx(math.exp(of_text["loss"]))
    _, output, progress = use(
        evaluate, "--data-path", corpus, "--json", "--stride", "16", "--micro-batch-size", "64"
    )
    assert progress[:2] == ["evaluated 64 windows", "evaluated 128 windows"]
    of_corpus = json.loads(output)
    assert of_corpus["num_tokens"] == text.stat().st_size - 1  # nothing predicts the first
    assert of_corpus["loss"] == pytest.approx(of_text["loss"], rel=0.05)


def test_text_from_prompts(trained: Path, use: Any) -> None:
    status, output, log = use(generate, "--prompt", "document", "--temperature", "0", "--ignore-eod")
    assert status == 0
    assert output.startswith("document")
    assert "25 new tokens" in log[-1]  # 8 + 25 positions - 1 are the model's 32
    prompts = trained / "prompts.jsonl"
    prompts.write_text('{"prompt": "document"}\n{"prompt": ""}\n')
    flags = ("--prompt-file", str(prompts), "--num-samples", "2", "--json", "--max-new-tokens", "5")
    _, output, _ = use(generate, *flags, "--ignore-eod")
    texts = [json.loads(line) for line in output.splitlines()]
    assert [(text["prompt"], text["sample"]) for text in texts] == [
        ("document", 0), ("document", 1), ("", 0), ("", 1)
    ]  # fmt: skip
    assert all(len(text["ids"]) == 5 and text["finish_reason"] == "length" for text in texts)
    assert len({tuple(text["ids"]) for text in texts}) == 4
    assert use(generate, *flags, "--ignore-eod", "--batch-size", "1")[1] == output


MISTAKES = (
    (generate, ("--prompt", "x" * 40), "prompt 0 has 40 tokens, but the model has 32 positions"),
    (generate, ("--prompt", "x", "--tp", "3"), "--tp 3 does not divide the number of ranks, 1"),
    (generate, ("--prompt", "x", "--load-iteration", "3"), "has no checkpoint iter_0000003"),
    (generate, ("--prompt", "x", "--tokenizer-type", "GPT2BPETokenizer"), "needs --vocab-file"),
    (generate, ("--prompt", "x", "--load", "tests"), "--load tests has no checkpoint"),
    (generate, (), "one of the arguments --prompt --prompt-file is required"),
    (evaluate, ("--text", "nowhere.txt"), "--text nowhere.txt cannot be read"),
    (evaluate, ("--data-path", "nowhere"), "no such dataset file: nowhere.bin"),
    (evaluate, ("--split", "valid", "--stride", "3"), "remove --seq-length and --stride"),
    (evaluate, ("--text", "README.md", "--stride", "99"), "--stride 99 is more than the 32 tokens"),
    (evaluate, ("--text", "README.md", "--seq-length", "64"), "more than the model's 32 positions"),
)


def test_mistakes(use: Any) -> None:
    for tool, flags, message in MISTAKES:
        status, output, errors = use(tool, *flags)
        assert (status, output, len(errors)) == (1, "", 1), (flags, errors)
        assert errors[0].startswith("error: ") and message in errors[0]


def test_a_config_of_fewer_layers_gives_no_half_a_model(trained: Path, use: Any) -> None:
    checkpoint = trained / "checkpoints" / "iter_0000004"
    config = checkpoint / CONFIG
    config.write_text(re.sub(r"\bnum_layers: .*", "num_layers: 1", config.read_text()))
    reseal(checkpoint, CONFIG)
    status, output, errors = use(generate, "--prompt", "document")
    assert (status, output, len(errors)) == (1, "", 1)
    assert "the model of config.yaml, num_layers 1, has no layers.1." in errors[0]


MODELS = {
    "gpt": (),
    "bloom": ("--position-embedding-type", "alibi", "--embed-layernorm"),
    "llama": (
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
        *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--num-query-groups", "2"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_any_layout_uses_any_layouts_checkpoint(model: str, tmp_path: Path, pretrain: Any) -> None:
    """Trained with tp 2 x pp 2; used on one rank, and on four as tp 2 and two replicas."""
    save = str(tmp_path / "checkpoints")
    flags = (*MODELS[model], "--tp", "2", "--pp", "2", "--save", save, "--eval-interval", "4")
    told = tmp_path / "metrics.jsonl"
    result = pretrain(*flags, "--metrics-file", str(told), ranks=4)
    assert result.returncode == 0, result.stderr

    def use(tool: str, *flags: str, ranks: int = 1) -> str:
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        result = subprocess.run(
            [*launcher, f"tools/{tool}.py", "--load", save, *flags, *(("--tp", "2") if ranks > 1 else ())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    (logged,) = (loss for (split, _), loss in validations(tmp_path).items() if split == "valid")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("document 1\nment\nd\n")
    split = ("--split", "valid", "--json", "--micro-batch-size", "1")
    text = ("--text", "LICENSE", "--json", "--dtype", "fp64", "--stride", "20", "--micro-batch-size", "16")
    many = ("--prompt-file", str(prompts), "--json", "--dtype", "fp64", "--batch-size", "1")
    one = ("--prompt", "document 1", "--dtype", "fp64")
    for ranks in (1, 4):
        assert json.loads(use("evaluate", *split, ranks=ranks))["loss"] == pytest.approx(logged, rel=1e-5)
    losses = [json.loads(use("evaluate", *text, ranks=ranks))["loss"] for ranks in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert use("generate", *many) == use("generate", *many, ranks=4)
    assert use("generate", *one) == use("generate", *one, ranks=4)
