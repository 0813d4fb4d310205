"""The program `megalite`: it runs one of the commands, which share all of the package.

megalite plan --help
torchrun --nproc-per-node 4 -m megalite train --config run.yaml
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence

from megalite import __version__
from megalite.commands import COMMANDS


def main() -> None:
    """Run the command that the first argument names. Only its code is imported."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print("\n".join(_help()))
        return
    if name == "--version":
        print(f"megalite {__version__}")
        return
    from megalite.config.entry_point import run_main, run_rank

    if name not in COMMANDS:
        run_main(_reject, [name])
    sys.argv = [f"megalite {name}", *arguments]  # argparse shows the first as the program's name
    program = importlib.import_module(f"megalite.cli.{name.replace('-', '_')}")
    (run_rank if COMMANDS[name].is_rank else run_main)(program.main, arguments)


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
    from megalite.config.fields import nearest_hint
    from megalite.errors import UserError

    (name,) = arguments
    raise UserError(f"unknown command {name}{nearest_hint(name, COMMANDS)} (see megalite --help)")


if __name__ == "__main__":
    main()
