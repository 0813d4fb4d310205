"""Run a program's main function: report user errors, and end quietly when nobody reads the output."""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megalite.utils.errors import UserError

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
