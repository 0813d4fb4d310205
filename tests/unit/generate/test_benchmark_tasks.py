"""Scores of lm-evaluation-harness are equal to the scores of its own Hugging Face backend."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager, manager
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megalite.checkpoint.convert.convert import Conversion
from megalite.cli.generate import evaluate
from megalite.distributed.topology import Topology
from megalite.generate import benchmark_tasks
from megalite.generate.benchmark_tasks import HarnessModel, evaluate_tasks
from megalite.generate.trained_model import ModelFlags, TrainedModel, open_trained, tokenizer_of
from megalite.utils.errors import UserError

LENGTH = 48
TEXTS = (
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void; and darkness was upon the face of the deep.",
    "And God said, Let there be light: and there was light.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and a tokenizer, in both formats."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    wrapped.save_pretrained(folder / "hf")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    Conversion(folder / "hf", folder / "ours", check=False).run()
    return folder


def flags_of(folder: Path) -> ModelFlags:
    tokenizer = dict.fromkeys(
        ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tokenizer_name_or_path")
    )
    return ModelFlags.of(
        Namespace(
            load=folder / "ours",
            load_iteration=None,
            dtype=None,
            tp=1,
            pp=1,
            cp=1,
            distributed_backend="gloo",
            ema=False,
            **tokenizer,
        )
    )


def loaded(folder: Path, topology: Topology) -> tuple[TrainedModel, Any]:
    flags = flags_of(folder)
    trained = open_trained(flags, topology)
    return trained, tokenizer_of(trained, flags, topology)


@pytest.fixture
def models_of_both(folder: Path, one_rank: Topology) -> tuple[HarnessModel, HFLM]:
    trained, tokenizer = loaded(folder, one_rank)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf")
    reference = HFLM(
        pretrained=theirs,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder / "hf"),
        device="cpu",
        batch_size=2,
        max_length=LENGTH,
    )
    return HarnessModel(trained, tokenizer, 2, one_rank), reference


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def test_log_likelihoods(models_of_both: tuple[HarnessModel, HFLM]) -> None:
    """Continuations of several lengths, without a context, and with more tokens than the model reads."""
    ours, theirs = models_of_both
    pairs = [(text[:20], text[20:]) for text in TEXTS]
    pairs += [("", TEXTS[0]), ("In the ", "beginning"), (" ".join(TEXTS), " light")]
    greedy = theirs.generate_until(
        requests("generate_until", ("God", {"until": ["zzz"], "max_gen_toks": 2, "do_sample": False}))
    )
    pairs.append(("God", greedy[0]))
    asked = requests("loglikelihood", *pairs)
    found, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked)
    assert [each[1] for each in found] == [each[1] for each in expected]
    assert any(each[1] for each in found)
    for (value, _), (other, _) in zip(found, expected, strict=True):
        assert value == pytest.approx(other, rel=1e-5, abs=1e-5)
    with pytest.raises(UserError, match="an answer of 60 tokens, and the model reads 48"):
        ours.loglikelihood(requests("loglikelihood", ("x", "y" * 60)))


def test_rolling_log_likelihoods(models_of_both: tuple[HarnessModel, HFLM]) -> None:
    ours, theirs = models_of_both
    asked = requests("loglikelihood_rolling", *((text,) for text in (*TEXTS, " ".join(TEXTS * 3))))
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), rel=1e-5)


def test_generated_text(models_of_both: tuple[HarnessModel, HFLM]) -> None:
    """Up to a stop string, to the largest number of tokens, and after a context that is cut."""
    ours, theirs = models_of_both
    options = {"until": ["zzz"], "max_gen_toks": 9, "do_sample": False}
    texts = theirs.generate_until(requests("generate_until", *((text, options) for text in TEXTS)))
    stop = texts[0][3:5]
    asked = requests(
        "generate_until",
        *((text, options) for text in TEXTS),
        *((text, {**options, "until": [stop]}) for text in TEXTS),
        (" ".join(TEXTS * 3), options),
    )
    found = ours.generate_until(asked)
    assert found == theirs.generate_until(asked)
    assert stop not in found[3] and len(found[3]) < len(found[0])
    with pytest.raises(UserError, match="generates up to 50 tokens, and the model reads 48"):
        ours.generate_until(requests("generate_until", ("a", {**options, "max_gen_toks": 50})))


def write_task(folder: Path) -> None:
    """Write a task with two choices, and its data."""
    rows = [{"text": text[:20], "choices": [text[20:], "zzzz"], "label": 0} for text in TEXTS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "verses.yaml").write_text(
        f"""
task: verses
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "rows.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
""",
        encoding="utf-8",
    )


def test_task_of_a_folder(
    folder: Path, one_rank: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness's own tasks are not read, which takes long."""
    monkeypatch.setattr(benchmark_tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    write_task(tmp_path)
    trained, tokenizer = loaded(folder, one_rank)
    options = {"folder": tmp_path, "num_fewshot": 0, "limit": 2, "batch_size": 2}
    results = evaluate_tasks(trained, tokenizer, one_rank, ["verses"], **options)
    assert results is not None and results["n-samples"]["verses"]["effective"] == 2
    assert 0.0 <= results["results"]["verses"]["acc,none"] <= 1.0


def test_unknown_task(
    folder: Path, one_rank: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of the harness and one of the folder are known. Of the harness's own, only ARC's are read."""
    monkeypatch.setattr(manager, "__file__", str(Path(manager.__file__).parent / "arc" / "manager.py"))
    write_task(tmp_path)
    trained, tokenizer = loaded(folder, one_rank)
    names = ["arc_easy", "verses", "no_such_task"]
    message = f"--tasks no_such_task: lm-evaluation-harness does not know it, and {tmp_path} has no such task"
    with pytest.raises(UserError, match=message):
        evaluate_tasks(trained, tokenizer, one_rank, names, folder=tmp_path, batch_size=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--text", "file", "--limit", "3"), "--limit is for --tasks"),
        (("--tasks", "arc_easy", "--seq-length", "8"), "remove --seq-length"),
    ],
)
def test_bad_flags(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(["--load", "folder", *flags])
