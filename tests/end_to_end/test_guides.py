"""The commands of docs/guides.md that need no cluster and no GPU, pasted in the order of the page."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.end_to_end.conftest import make_checkout, paste
from tests.unit.docs.test_guides import COMMAND_LINES, RUN

ELSEWHERE = (
    "install.sh",
    "az ",
    "nsys ",
    "pip ",
    "sbatch ",
    "scripts/check_gpu.sh",
    "tensorboard ",
    "HOST",
    "--fp8-format",
)
"""Parts of commands that need a cluster, a GPU or a network, or do not end."""
HERE = list(dict.fromkeys(line for line in COMMAND_LINES if not any(part in line for part in ELSEWHERE)))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with what scripts/quickstart.sh leaves, from a few of its iterations."""
    folder = make_checkout(tmp_path_factory.mktemp("guides"))
    script = (folder / "scripts" / "quickstart.sh").read_text()
    steps = script[script.index("say() {") : script.index('say "Generating')].replace(
        "scripts/install.sh\n", ""
    )
    short = steps.replace("--exit-interval 200", "--exit-interval 20").replace("\ntrain\n", "\n")
    paste(folder, f"run=runs/quickstart\n{short}")
    return folder


def test_most_commands_run_here() -> None:
    assert len(HERE) > 60


@pytest.mark.slow
def test_the_commands_run_as_pasted(checkout: Path) -> None:
    """Run all rows in one test: later ones read what earlier ones wrote."""
    failed = []
    for line in HERE:
        try:
            paste(checkout, f'. .venv/bin/activate\nRUN="{RUN}"\n{line}')
        except AssertionError as error:
            failed.append(f"{line}\n{error}")
    assert not failed, "\n\n".join(failed)


def test_commands_on_data_run_one_after_the_other(tmp_path: Path) -> None:
    """Run the rows before and after which others need files, on a part of the corpus."""
    folder = make_checkout(tmp_path)
    (folder / "scripts").unlink()
    corpus = folder / "scripts" / "corpus" / "bible.jsonl.gz"
    corpus.parent.mkdir(parents=True)
    with gzip.open(Path(__file__).parents[2] / "scripts" / "corpus" / corpus.name, "rt") as lines:
        corpus.write_bytes(gzip.compress("".join(next(lines) for _ in range(50)).encode()))
    programs = ("preprocess_data.py", "merge_datasets.py", "train_tokenizer.py")
    rows = [line for line in HERE if any(program in line for program in programs)]
    assert len(rows) == 4
    paste(folder, ". .venv/bin/activate\n" + "\n".join(rows))
    assert (folder / "runs" / "two.idx").exists()
