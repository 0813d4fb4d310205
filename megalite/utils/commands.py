"""The commands of megalite: how to run one, report its user errors, and name it in messages to the user.

A program ends quietly when nobody reads its output.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from megalite.utils.errors import UserError


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
    "generate": Command(
        "tools/generate.py", "continue prompts with a trained model", "generate", is_rank=True
    ),
    "evaluate": Command("tools/evaluate.py", "compute loss and perplexity of text", "generate", is_rank=True),
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


_LOST_PEER = ("Connection closed by peer", "Connection reset by peer")
"""Parts of gloo's message when the other end of a collective is gone."""
_SECONDS_FOR_THE_FIRST_RANK = 10.0
"""Seconds that other ranks wait for rank 0 to report: torchrun ends all ranks as soon as one has failed."""
_INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
_BROKEN_PIPE = 141
"""Exit status after the reader of the output closed the pipe: the status of a program ended by SIGPIPE."""


def run_main(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Run a program; on a `UserError` print its lines and exit with status 1.

    Rank 0 prints one `error: ` line per mistake; another rank prints only errors that may be its alone.
    torchrun prints the lines again at the end of its report. Any other exception keeps its traceback.

    If the reader closes the pipe (`| head`), the program ends silently when it prints more. If its last
    output is still in Python's buffer at the end, that output is dropped, and the exit status is the
    program's own.
    """
    try:
        main(arguments)
    except UserError as error:
        lines = [f"error: {line}" for line in str(error).splitlines()]
        if is_first_rank() or error.on_one_rank:
            sys.stderr.writelines(f"{line}\n" for line in lines)
        else:
            time.sleep(_SECONDS_FOR_THE_FIRST_RANK)
        _record_for_torchrun(lines)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        if is_first_rank():
            sys.stderr.write("error: interrupted\n")
        raise SystemExit(_INTERRUPTED) from None
    except RuntimeError as error:
        if not any(text in str(error) for text in _LOST_PEER):
            raise
        rank = os.environ.get("RANK", "0")
        sys.stderr.write(f"error: rank {rank} lost the connection to another rank: see that rank's message\n")
        raise SystemExit(1) from None
    except BrokenPipeError:
        if not _output_has_no_reader():  # a socket, or the pipe to another process
            raise
        raise SystemExit(_BROKEN_PIPE) from None
    finally:
        _flush_output()


def run_rank(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> NoReturn:
    """Run a program that may be one of several ranks, as `run_main` does, and end the process at once.

    The functions of `atexit` are called, but Python does not finalize. Finalization would end a thread of
    torch.distributed that waits for the interpreter inside C++, which sometimes aborts the process
    ("terminate called without an active exception"): torchrun would then report a successful run as failed.
    """
    status = 0
    try:
        run_main(main, arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")  # as Python does
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"error: the output cannot be written ({error.strerror})\n")
        status = status or 1
    sys.stderr.flush()
    os._exit(status)


def _output_has_no_reader() -> bool:
    """Return whether standard output is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are reported even if no event is requested
    return bool(poll.poll(0))


def _flush_output() -> None:
    """Flush the output now. At exit, Python would report a closed pipe and change the exit status."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass  # such as a full disk: Python reports it at exit


def _record_for_torchrun(lines: Sequence[str]) -> None:
    """Write the lines to torchrun's error file, in the format of torch's `record` decorator.

    torchrun ends its own traceback with the file of the rank that failed first.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun compares whole seconds: one earlier is before the ranks that it ends because of this one.
        message = {"message": "\n".join(lines), "extraInfo": {"timestamp": str(int(time.time()) - 1)}}
        with suppress(OSError):  # torchrun prints a text of its own if there is no file
            Path(file).write_text(json.dumps({"message": message}))


def is_first_rank() -> bool:
    """Return whether this process is the launcher's rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"
