"""Write the roofline's figures into the tables of the documentation.

A row of such a table ends with flags of `benchmarks/roofline.py`, and the milliseconds and MFU of the step:

    | H200, 1 | `--micro-batch-size 1` | 46.6 | 37.6% |
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

from benchmarks import roofline, roofline_published

_ROW = re.compile(r"^(\| [^|\n]* \| `(--[^`\n]*)` \| )[\d.]+ \| [\d.]+% \|$", re.MULTILINE)
_PUBLISHED = re.compile(r"(?<=^\$ python -m benchmarks\.roofline_published\n)[^`]*", re.MULTILINE)


def step_and_mfu(flags: str) -> tuple[str, str]:
    """Return the step's milliseconds and MFU that the program prints with these flags."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        roofline.main(flags.split())
    last = dict(re.findall(r"^(step|MFU) .* ([\d.]+%?)$", printed.getvalue(), re.MULTILINE))
    return last["step"], last["MFU"]


def with_figures(text: str) -> str:
    """Return the text of a page with current figures."""

    def renew(row: re.Match[str]) -> str:
        return "{}{} | {} |".format(row[1], *step_and_mfu(row[2]))

    published = "\n".join(roofline_published.lines(roofline_published.compared_runs())) + "\n"
    return _ROW.sub(renew, _PUBLISHED.sub(lambda _: published, text))
