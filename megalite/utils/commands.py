"""The commands of megalite, and how to name them in messages to the user."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """Command of `megalite`.

    Attributes:
        script: the script that runs it from a checkout.
        summary: one line for `megalite --help`.
        module: the module of `megalite.cli` that has its function, with the command's name; by default it is
            `main` of the module with this name.
        is_rank: whether torchrun may start it, once per rank.
    """

    script: str
    summary: str
    module: str | None = None
    is_rank: bool = False


COMMANDS = {
    "train": Command("pretrain_gpt.py", "train a model; under torchrun, on many ranks", is_rank=True),
    "train-bert": Command(
        "pretrain_bert.py", "train a BERT; under torchrun, on many ranks", "train", is_rank=True
    ),
    "preprocess": Command("tools/preprocess_data.py", "tokenize text files into a dataset"),
    "prepare": Command("tools/prepare_corpus.py", "filter, deduplicate, shuffle and tokenize raw text"),
    "plan": Command(
        "tools/plan.py", "estimate memory, time and price of a run, and search its layout", "plan"
    ),
    "generate": Command("tools/generate.py", "continue prompts with a trained model", is_rank=True),
    "evaluate": Command("tools/evaluate.py", "compute loss and perplexity of text", is_rank=True),
    "convert": Command(
        "tools/convert_checkpoint.py", "convert a checkpoint of Hugging Face or Megatron-LM", "checkpoints"
    ),
    "inspect": Command("tools/inspect_checkpoint.py", "show, check or compare checkpoints", "checkpoints"),
    "verify": Command("tools/verify_layout.py", "verify that a config trains the same run in any layout"),
    "judge": Command("tools/judge.py", "judge whether another program trains the same run in any layout"),
    "report": Command("tools/report.py", "write an HTML page about runs"),
    "ladder": Command("tools/ladder.py", "train one family of models at several sizes, and fit its losses"),
    "launch": Command(
        "tools/make_sbatch.py", "write a Slurm script or a Kubernetes job for a planned run", "plan"
    ),
    "autotune": Command("tools/autotune.py", "measure the planner's best layouts on this machine", "plan"),
    "scaling": Command(
        "tools/measure_scaling.py", "measure how a run scales over nodes, beside its plan", "plan"
    ),
    "train-tokenizer": Command(
        "tools/train_tokenizer.py", "train a BPE or SentencePiece tokenizer", "datasets"
    ),
    "inspect-dataset": Command("tools/inspect_dataset.py", "show, check or compare datasets", "datasets"),
    "data-plan": Command(
        "tools/data_plan.py", "show the epochs of each source in a mixture that changes", "datasets"
    ),
    "merge-datasets": Command("tools/merge_datasets.py", "join datasets", "datasets"),
    "merge-checkpoints": Command(
        "tools/merge_checkpoints.py", "average the weights of checkpoints", "checkpoints"
    ),
    "upcycle": Command(
        "tools/upcycle_checkpoint.py", "make a model with experts from a dense checkpoint", "checkpoints"
    ),
    "show-schedule": Command("tools/show_schedule.py", "draw a pipeline schedule", "plan"),
    "where": Command("tools/where.py", "show the documents of the samples of an iteration"),
}


def main_of(name: str) -> Callable[[Sequence[str]], None]:
    """Import the function that runs a command."""
    module = COMMANDS[name].module
    function = "main" if module is None else name.replace("-", "_")
    main: Callable[[Sequence[str]], None] = getattr(import_module(f"megalite.cli.{module or name}"), function)
    return main


def command_name(name: str) -> str:
    """Return a command as the user would type it here: `megalite plan` or `tools/plan.py`."""
    return COMMANDS[name].script if _started_by_script() else f"megalite {name}"


def torchrun_arguments(name: str) -> str:
    """Return torchrun's arguments that run a command: `-m megalite train` or `pretrain_gpt.py`."""
    return COMMANDS[name].script if _started_by_script() else f"-m megalite {name}"


def with_command_names(text: str) -> str:
    """Replace each `megalite NAME` in a help text with the command as the user would type it."""
    if not _started_by_script():
        return text
    names = "|".join(sorted(COMMANDS, key=len, reverse=True))  # match `inspect-dataset` before `inspect`
    text = re.sub(r"^megalite ", "python megalite ", text, flags=re.MULTILINE)  # an example
    return re.sub(rf"(-m )?megalite ({names})\b", lambda found: COMMANDS[found[2]].script, text)


def _started_by_script() -> bool:
    return Path(sys.argv[0]).name in {Path(command.script).name for command in COMMANDS.values()}


def command_lines(command: str, width: int = 80) -> list[str]:
    """Break a command between flags into shell lines of at most `width` columns."""
    lines: list[str] = []
    for unit in re.split(r" (?=--)", command):
        if not lines or len(lines[-1]) + len(unit) + 3 > width:  # a space before it, and " \\" after it
            lines.append(f"    {unit}" if lines else unit)
        else:
            lines[-1] += f" {unit}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
