"""Write deepspeed_points.json: the learning rate of each update by DeepSpeed's own schedulers.

Run it where DeepSpeed is installed (``DS_BUILD_OPS=0 pip install deepspeed``). As in DeepSpeed's engine, the
scheduler takes a step after each update, and its constructor sets the rate of the first.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

NUM_UPDATES = 32
PEAK = 3e-4


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the parameters of each scheduler."""
    found: list[tuple[str, dict[str, Any]]] = []
    for warmup_type, steps in itertools.product(("log", "linear"), (1, 7, 12, 50)):
        shape = {"warmup_type": warmup_type, "warmup_num_steps": steps}
        for low in ({}, {"warmup_min_lr": 2e-5, "warmup_max_lr": 1e-3}):
            found.append(("WarmupLR", {**shape, **low}))
            for total in (5, 12, 28):
                found.append(
                    ("WarmupDecayLR", {"total_num_steps": total, "warmup_max_lr": PEAK, **shape, **low})
                )
        for ratios in ({}, {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}):
            for total in (5, 12, 28):
                found.append(("WarmupCosineLR", {"total_num_steps": total, **shape, **ratios}))
    found += [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 40, "warmup_max_lr": PEAK})]
    found += [("WarmupCosineLR", {"total_num_steps": 40})]
    return found


def rates(kind: str, params: dict[str, Any]) -> list[float]:
    """Return the rate of each update."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    found = []
    for _ in range(NUM_UPDATES):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def main() -> None:
    """Write the file beside this one."""
    import deepspeed

    lines = [
        json.dumps(
            {
                "name": "-".join([kind, *map(str, params.values())]),
                "type": kind,
                "lr": PEAK,
                "params": params,
                "rates": rates(kind, params),
            }
        )
        for kind, params in cases()
    ]
    text = f'{{"deepspeed": "{deepspeed.__version__}", "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    Path(__file__).with_suffix(".json").write_text(text)


if __name__ == "__main__":
    main()
