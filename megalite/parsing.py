"""Parse text that comes from outside of the program."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, or is nested too deeply for Python (its own error is a RecursionError).
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
