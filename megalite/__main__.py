"""The program `megalite`: it runs one of the commands, which share all of the package.

megalite plan --help
torchrun --nproc-per-node 4 -m megalite train --config run.yaml
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from megalite import __version__
from megalite.utils.commands import COMMANDS, main_of, run_main, run_rank


def main() -> None:
    """Run the command that the first argument names, or list the commands."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [f"megalite {name}", *arguments]  # argparse shows the first as the program's name
        run_command(name)
        return
    try:
        if name in ("--help", "-h"):
            print("\n".join(_help()), flush=True)
            return
        if name == "--version":
            print(f"megalite {__version__}", flush=True)
            return
    except BrokenPipeError:  # such as `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    run_main(_reject, [name])


def run_command(name: str) -> None:
    """Run a command with the arguments of this process. Only its code is imported."""

    def import_and_run(arguments: Sequence[str]) -> None:
        # Import here, where Ctrl-C ends the program with one line: importing torch takes seconds.
        main_of(name)(arguments)

    (run_rank if COMMANDS[name].is_rank else run_main)(import_and_run, sys.argv[1:])


def _help() -> Iterator[str]:
    yield "usage: megalite COMMAND [flags]"
    yield ""
    width = max(map(len, COMMANDS))
    for name, command in COMMANDS.items():
        yield f"  {name:{width}}  {command.summary}"
    yield ""
    yield "megalite COMMAND --help lists the flags of a command, megalite --version prints the version."


def _reject(arguments: Sequence[str]) -> None:
    """Refuse an unknown command, by its nearest known one."""
    from megalite.config.arguments import nearest_hint
    from megalite.utils.errors import UserError

    (name,) = arguments
    raise UserError(f"unknown command {name}{nearest_hint(name, COMMANDS)} (see megalite --help)")


if __name__ == "__main__":
    main()
