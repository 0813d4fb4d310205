"""Count the operators that a train step launches for each layer, and for everything else.

    python -m tests.fake_cuda.launches    # write launches.yaml, and print what has changed

Two models whose numbers of layers differ by one give the counts of a layer.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from tests.fake_cuda.cases import Case, case
from tests.fake_cuda.child import FakeGpu, fake_gpu

FILE = Path(__file__).with_name("launches.yaml")
COMMAND = "python -m tests.fake_cuda.launches"
MODELS = {
    "gpt-1.3b": case(preset="gpt-1.3b"),
    "gpt-1.3b, tp2+sp": case("tp2+sp", preset="gpt-1.3b"),
    "gpt-1.3b, dp2+zero1": case("dp2+zero1", preset="gpt-1.3b"),
    "gpt-1.3b, dp2+zero3": case("dp2+zero3", preset="gpt-1.3b"),
    "llama2-7b": case(preset="llama2-7b"),
}
"""Steps of one microbatch in bf16."""
NUM_LAYERS = 2

Counts = dict[str, dict[str, int]]
"""Numbers of launches by operator, by phase."""
Table = dict[str, dict[str, Counts]]
"""Counts of a layer and of the rest of a step, by model."""


def count(gpu: FakeGpu, name: str) -> dict[str, Counts]:
    """Return the launches of a layer and of the rest of a step."""
    smaller, larger = (_launches(gpu, MODELS[name], NUM_LAYERS + more) for more in (0, 1))
    layer: Counts = {}
    rest: Counts = {}
    for phase in larger:
        one = {op: larger[phase][op] - smaller[phase][op] for op in larger[phase]}
        layer[phase] = _sorted(one)
        rest[phase] = _sorted({op: smaller[phase][op] - NUM_LAYERS * one[op] for op in one})
    return {"layer": layer, "rest": rest}


def _launches(gpu: FakeGpu, model: Case, num_layers: int) -> dict[str, Counter[str]]:
    options = {"num_layers": num_layers, "micro_batch_size": 1}
    (outcome,) = gpu(replace(model, options=options, num_microbatches=1)).values()
    assert not outcome.error, outcome.error
    return outcome.launches


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    return {op: number for op, number in sorted(counts.items()) if number}


def differences(expected: Table, found: Table) -> Iterator[str]:
    """Yield a line for each count that differs."""
    for name in found:
        for part in found[name]:
            before, now = (table.get(name, {}).get(part, {}) for table in (expected, found))
            for phase in dict.fromkeys([*before, *now]):
                one, other = (Counter(counts.get(phase, {})) for counts in (before, now))
                changed = [op for op in sorted(one | other) if one[op] != other[op]]
                if changed:
                    ops = ", ".join(f"{op} {one[op]} -> {other[op]}" for op in changed)
                    of = "a layer" if part == "layer" else "the rest"
                    yield f"{name}: {phase} of {of}: {sum(one.values())} -> {sum(other.values())} ({ops})"


def read() -> Table:
    table: Table = yaml.safe_load(FILE.read_text()) if FILE.exists() else {}
    return table


def main() -> None:
    """Write the table, and print the differences from the old one."""
    with tempfile.TemporaryDirectory() as folder, fake_gpu(Path(folder)) as gpu:
        table = {name: count(gpu, name) for name in MODELS}
    lines = list(differences(read(), table))
    text = yaml.safe_dump(table, sort_keys=False, width=110, default_flow_style=None)
    FILE.write_text(f"# Operators launched in a train step. Written by {COMMAND}.\n{text}")
    print("\n".join(lines or ["no count has changed"]))


if __name__ == "__main__":
    main()
