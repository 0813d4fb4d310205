"""A run's folder as training leaves it, made without training, at times that a test says."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megalite.train.telemetry.metrics import IterationMetrics

ITERATION_MS = 500.0


def iteration(number: int, start: float, at: float, **changes: Any) -> dict[str, Any]:
    """One iteration's line of a metrics file."""
    metrics = IterationMetrics(
        iteration=number,
        consumed_samples=8 * number,
        consumed_tokens=1024 * number,
        lm_loss=2.0 + 6.0 * math.exp(-number / 40) + 0.1 * math.sin(number * 12.9898),
        grad_norm=1.0 + 0.2 * math.cos(number * 78.233),
        learning_rate=1e-3 * min(1.0, number / 20),
        global_batch_size=8,
        loss_scale=1.0,
        skipped=False,
        iteration_time_ms=ITERATION_MS,
        tokens_per_second=2048.0,
        tflops_per_gpu=120.0,
        mfu=0.38,
        memory_allocated_mb=30_000.0,
        memory_reserved_mb=40_000.0,
        train_iters=200,
        num_iterations=1,
        num_skipped=0,
        num_nan=0,
        device="cuda",
    )
    return dataclasses.asdict(metrics) | {"start_time": start, "wall_time": at} | changes


def evaluation(number: int, start: float, at: float, loss: float) -> dict[str, Any]:
    told = {"iteration": number, "consumed_samples": 8 * number, "split": "valid", "lm_loss": loss}
    return {"validation": told, "start_time": start, "wall_time": at}


def write_metrics(file: Path, records: Iterable[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def write_restarted_run(folder: Path) -> Path:
    """200 iterations, killed after 130 and begun again at 101 a minute later; one is slow, one is NaN.

    The first start is at second 1000. An iteration takes half a second, the evaluation at 100 two seconds.
    """
    records, now = [], 1000.0
    for number in range(1, 131):
        now += ITERATION_MS / 1e3
        records.append(iteration(number, 1000.0, now))
        if number == 100:
            now += 2.0
            records.append(evaluation(100, 1000.0, now, 2.6))
            checkpoint = folder / "checkpoints" / "iter_0000100"
            checkpoint.mkdir(parents=True)
            (checkpoint / "config.yaml").write_text("model:\n  num_layers: 4 # <b>\n")
            written = {"start_time": now + 0.5, "end_time": now + 3.5}
            (checkpoint / "run.json").write_text(json.dumps({"written": written}))
            now += 4.0
    start = now = now + 60.0
    for number in range(101, 201):
        seconds = 7.5 if number == 150 else ITERATION_MS / 1e3
        now += seconds
        changes = {"lm_loss": "NaN"} if number == 170 else {}
        records.append(iteration(number, start, now, iteration_time_ms=1e3 * seconds, **changes))
    records.append(evaluation(200, start, now + 2.0, 2.2))
    write_metrics(folder / "metrics.jsonl", records)
    (folder / "train.log").write_text("using world size: 4\nstraggler: rank 3 (n1) computes 9 ms\nend\n")
    return folder
