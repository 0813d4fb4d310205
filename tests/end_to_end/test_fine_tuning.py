"""Fine-tuning on conversations, as a user runs it: mistakes, docs/finetuning.md, a model of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.chat import CHATML, VOCABULARY, conversations, preprocess_chat, user, write_masked, write_tokenizer
from tests.end_to_end.conftest import ROOT, RunHere, make_checkout, paste, status_of
from tests.programs import run_program

PAGE = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
(COMMANDS,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FLAGS = (
    *("--preset", "llama-tiny", "--seq-length", "64", "--split", "80,20", "--global-batch-size", "4"),
    *("--train-iters", "1", "--log-interval", "1", "--eval-interval", "1", "--eval-iters", "9", "--lr", "0"),
)


def _losses(metrics: Path) -> tuple[float, float]:
    """The losses of the first iteration, and of the evaluation after it."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    (trained,) = (row["lm_loss"] for row in rows if "lm_loss" in row)
    return trained, next(row["validation"]["lm_loss"] for row in rows if "validation" in row)


@pytest.mark.slow
def test_packing_does_not_change_the_validation_loss(pretrain_here: RunHere, tmp_path: Path) -> None:
    """Without updates, in fp32; the training losses differ, because their batches do."""
    prefix = preprocess_chat(tmp_path, conversations(40))
    run = (*FLAGS, "--tokenizer-model", str(tmp_path / "tokenizer" / "tokenizer.json"))

    def losses(*flags: str) -> tuple[float, float]:
        metrics = tmp_path / f"{len(flags)}.jsonl"
        line = ("--data-path", prefix, "--sft", *flags, "--metrics-file", str(metrics))
        status, errors = pretrain_here(*line, base=run)
        assert status == 0, errors
        return _losses(metrics)

    packed, unpacked = losses(), losses("--no-sft-packing")
    assert packed[1] == pytest.approx(unpacked[1], abs=1e-6)
    assert packed[0] != unpacked[0]
    assert packed[1] != losses("--sft-long-conversations", "drop")[1]


def _mistakes(folder: Path) -> list[tuple[tuple[str, ...], str]]:
    text, masked, other = (write_masked(str(folder / name), [9] * 40) for name in ("text", "masked", "other"))
    Path(f"{text}.loss_mask").unlink()
    Path(f"{masked}.loss_mask").write_bytes(bytes(360))
    Path(f"{other}.loss_mask").write_bytes(np.ones(359, np.uint8).tobytes())
    long = write_masked(str(folder / "long"), [80] * 40, first_answer=70)
    return [
        ((text,), "has no answers marked, there is no "),
        ((masked,), "marks no token of the first 16 conversations as an answer"),
        ((other,), "other.loss_mask has 359 bytes, and "),
        ((long,), "none of them has an answer within --seq-length 64"),
        ((long, "--sft-long-conversations", "drop"), "none of them has an answer within --seq-length 64"),
        ((text, "--eod-mask-loss"), "--eod-mask-loss with --sft, which separates conversations by itself"),
    ]


def test_mistakes_are_one_line(pretrain_here: RunHere, tmp_path: Path) -> None:
    for flags, message in _mistakes(tmp_path):
        status, lines = pretrain_here(
            "--data-path", *flags, "--sft", base=(*FLAGS, "--vocab-size", str(VOCABULARY * 2))
        )
        errors = [line for line in lines if line.startswith("error: ")]
        assert (status, len(errors)) == (1, 1), (flags, lines)
        assert message in errors[0]


def test_conversations_without_sft_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    prefix = write_masked(str(tmp_path / "chat"), [9] * 60)
    assert status_of(*FLAGS, "--vocab-size", "600", "--data-path", prefix) == 0
    warning = f"warning: {prefix} holds conversations: pass --sft to learn only their answers"
    assert warning in capsys.readouterr().out.splitlines()


def test_the_page_has_commands_for_the_examples() -> None:
    assert len(re.findall(r"^python|^torchrun", COMMANDS, re.MULTILINE)) == 4
    assert len((ROOT / "examples" / "chat" / "conversations.jsonl").read_text().splitlines()) == 600


@pytest.mark.slow
def test_the_commands_run_as_pasted(tmp_path: Path) -> None:
    """After one iteration of the model that scripts/quickstart.sh trains."""
    checkout = make_checkout(tmp_path)
    flags = "--config scripts/examples/quickstart.yaml --mock-data --lr-warmup-iters 0 --train-iters 1"
    save = "--save runs/quickstart/checkpoints"
    paste(checkout, f". .venv/bin/activate\npython pretrain_gpt.py {flags} {save}")
    printed = paste(checkout, COMMANDS.replace("--train-iters 150", "--train-iters 12"))
    assert "600 documents" in printed
    assert "user:\nWhat is the opposite of light?\nassistant:\n" in printed
    template = checkout / "runs" / "chat" / "hf" / "chat_template.jinja"
    assert template.read_text() == (ROOT / "examples" / "chat" / "chat_template.jinja").read_text()


@pytest.mark.slow
def test_a_model_of_transformers_is_fine_tuned_and_exported(tmp_path: Path) -> None:
    """The exported folder has the template, and its model and ours give the same loss on the answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    imported, exported = tmp_path / "imported", tmp_path / "exported"
    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(imported)
    tokenizer = write_tokenizer(imported)
    settings = {
        "chat_template": CHATML,
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (imported / "chat_template.jinja").unlink()
    (imported / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = conversations(40)
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(program: str, *flags: object) -> str:
        done = run_program(program, *map(str, flags))
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("tools/convert_checkpoint.py", "--load", imported, "--save", tmp_path / "ours")
    prefix = tmp_path / "data"
    line = ("--input", chat, "--output-prefix", prefix, "--tokenizer-model", tokenizer)
    run("tools/preprocess_data.py", "--chat", *line)
    run(
        "pretrain_gpt.py",
        *("--load", tmp_path / "ours", "--finetune", "--use-checkpoint-args", "--save", tmp_path / "run"),
        *("--sft", "--data-path", f"{prefix}_messages_document", "--tokenizer-model", tokenizer),
        *("--split", "80,20", "--global-batch-size", "4", "--train-iters", "3", "--lr", "1e-3"),
        *("--eval-iters", "9", "--metrics-file", tmp_path / "metrics.jsonl"),
    )
    run("tools/convert_checkpoint.py", "--load", tmp_path / "run", "--save", exported)
    theirs = AutoTokenizer.from_pretrained(exported)
    text = theirs.apply_chat_template([user("Why?")], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"

    model, total, number = AutoModelForCausalLM.from_pretrained(exported), 0.0, 0
    for row in rows[32:]:
        ids = theirs(theirs.apply_chat_template(row["messages"], tokenize=False))["input_ids"][:65]
        starts = "<|im_start|>assistant\n"
        labels, learns = [-100] * len(ids), False
        for i, token in enumerate(ids):
            labels[i] = token if learns else -100
            learns = (learns and token != theirs.convert_tokens_to_ids("<|im_end|>")) or theirs.decode(
                ids[: i + 1]
            ).endswith(starts)
        count = sum(label != -100 for label in labels[1:])
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total, number = total + float(loss) * count, number + count
    rows_of_metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [each["validation"]["lm_loss"] for each in rows_of_metrics if "validation" in each]
    assert evaluated[-1] == pytest.approx(total / number, rel=1e-5)
