"""Paste the blocks of README.md, in order, into a shell in a fresh clone, and check what comes out.

.ci/run runs this file. Pytest does not collect it by default because of its name: it takes minutes. The
clone holds the last commit, not the changes in the working tree.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megalite.data.indexed_dataset import IndexedDataset
from tests.corpora import split_ranges

ROOT = Path(__file__).parents[2]
SPLIT = "949,50,1"  # of scripts/examples/quickstart.yaml
VOCAB_SIZE = 2048
PROMPT = "And God said"
MARK = "== block"
SHORT_TEST = "tests/unit/utils/test_files.py"
"""The tests that `scripts/test.sh` of the README runs here: .ci/run runs all of them."""


class Block(NamedTuple):
    """A block of the README that a reader pastes, and the output that the README shows below it."""

    language: str
    text: str
    output: list[str]

    @property
    def commands(self) -> str:
        """Return the shell commands that run the block."""
        return self.text if self.language == "sh" else f"python - <<'END_OF_BLOCK'\n{self.text}END_OF_BLOCK\n"


def blocks() -> Iterator[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for found in re.finditer(
        r"^```(sh|python)\n(.*?)^```\n(.*?)(?=^```|^#|\Z)", text, re.MULTILINE | re.DOTALL
    ):
        yield Block(found[1], found[2], [line for line in found[3].splitlines() if line.startswith("    ")])


BLOCKS = list(blocks())


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme") / "megalite"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def outputs(clone: Path) -> list[str]:
    """Run all blocks in one shell, and return the output of each that ran."""
    hidden = {"VIRTUAL_ENV", "PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTEST_ADDOPTS"] = SHORT_TEST
    pasted = "".join(f"echo '{MARK}'\n{block.commands}" for block in BLOCKS)
    log = clone.parent / "log"
    with log.open("w") as file:
        command = ["bash", "-e", "-c", pasted]
        result = subprocess.run(
            command,
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    text = log.read_text()
    assert result.returncode == 0, text[-5000:]
    return text.split(f"{MARK}\n")[1:]


def words(line: str) -> list[str]:
    """Return the words of a line, without those that hold figures or names of parameters."""
    return [word for word in line.split() if not re.search(r"\d|\w\.\w", word)]


def test_every_block_of_the_readme_is_found() -> None:
    """No block is left out because it is written in another way."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 2 * len(BLOCKS) == len(re.findall("^```", text, re.MULTILINE))
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_prints_what_the_readme_shows(outputs: list[str], number: int) -> None:
    printed = iter(outputs[number].splitlines())
    for line in BLOCKS[number].output:
        shown = words(line)
        assert shown, f"nothing of this line can be compared: {line}"
        pattern = " ".join(".*" if word == "…" else re.escape(word) for word in shown)
        assert any(re.match(pattern, " ".join(words(each))) for each in printed), f"not printed: {line}"


def test_the_installed_package_trains_in_the_clone(outputs: list[str]) -> None:
    assert re.search(r"^ iteration +10/ +10 .* lm loss: 5\.", outputs[-1], re.MULTILINE)


def test_the_loop_of_the_readme_trains(outputs: list[str]) -> None:
    (python,) = (text for block, text in zip(BLOCKS, outputs, strict=True) if block.language == "python")
    losses = [float(line) for line in python.splitlines() if re.fullmatch(r"\d+\.\d+", line)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.3


@pytest.fixture(scope="module")
def run(clone: Path, outputs: list[str]) -> Path:
    """Return the folder of the quickstart's run."""
    return clone / "runs" / "quickstart"


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def validations(lines: list[dict[str, Any]]) -> dict[int, float]:
    found = [line["validation"] for line in lines if "validation" in line]
    return {each["iteration"]: each["lm_loss"] for each in found if each["split"] == "valid"}


def test_the_loss_fell(lines: list[dict[str, Any]]) -> None:
    losses = [line["lm_loss"] for line in lines if "iteration" in line]
    assert losses[-1] < losses[0] - 1.5
    assert losses == sorted(losses, reverse=True) or max(np.diff(losses)) < 0.2


def test_the_resumed_run_continued_from_the_checkpoint(lines: list[dict[str, Any]]) -> None:
    iterations = [line["iteration"] for line in lines if "iteration" in line]
    assert iterations == list(range(20, 301, 20))
    assert [line["consumed_samples"] for line in lines if "iteration" in line] == [16 * i for i in iterations]
    losses = {line["iteration"]: line["lm_loss"] for line in lines if "iteration" in line}
    assert abs(losses[220] - losses[200]) < 0.25


def test_it_beats_a_unigram_model(run: Path, validations: dict[int, float]) -> None:
    """Compare with the cross-entropy of the validation documents under the training token frequencies."""
    dataset = IndexedDataset(str(run / "corpus_text_document"))
    train, valid, _ = split_ranges(SPLIT, len(dataset))
    assert train is not None
    assert valid is not None
    counts = sum(np.bincount(dataset[i], minlength=VOCAB_SIZE) for i in train) + 1.0  # add-one smoothing
    log_probabilities = np.log(counts / counts.sum())
    tokens = np.concatenate([dataset[i] for i in valid])
    unigram = float(-log_probabilities[tokens].mean())
    assert 5.5 < unigram < math.log(VOCAB_SIZE)
    assert validations[300] < unigram - 1.0


def test_tensorboard_files_and_checkpoint_exist(run: Path) -> None:
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert (run / "checkpoints" / "latest").read_text().strip() == "iter_0000300"
    assert len(list((run / "checkpoints" / "iter_0000300").glob("*.safetensors"))) == 4


def test_it_generated_text(run: Path) -> None:
    text = (run / "text.txt").read_text()
    assert text.startswith(PROMPT)
    words = text.removeprefix(PROMPT).split()
    assert len(words) > 5
    corpus_words = sum(word.strip(".,;“”’").isalpha() for word in words)
    assert corpus_words > len(words) / 2
