"""How fast is preprocessing, beside Megatron-LM's own tools on the same corpus and tokenizer?

The corpus that ships with the repository is repeated to a size, which is kind to all tokenizers' caches.
Each command runs on it and on one document, which tells what is start-up; the speed is that of the rest.
Beside the speed by the clock stands that of one core by the processes' own time, which busy neighbours
change little.
Rows of what is not installed are left out by name.

    python benchmarks/preprocess.py --megatron ../Megatron-LM --megabytes 24 --workers 2
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "scripts" / "corpus"


@dataclass(frozen=True)
class Row:
    """One way to preprocess: a command less its input and output, and where Python finds modules for it."""

    name: str
    command: list[str]
    path: list[str]


class Seconds(NamedTuple):
    """Of the clock, and of all cores together."""

    clock: float
    cores: float


@dataclass(frozen=True)
class Measured:
    """A command's time on the corpus and on one document; the output's prefix."""

    whole: Seconds
    startup: Seconds
    output: Path

    def speed(self, size: int) -> Seconds:
        """MB/s by the clock, and of one core."""
        return Seconds(
            *(size / 1e6 / max(a - b, 1e-9) for a, b in zip(self.whole, self.startup, strict=True))
        )


def write_inputs(folder: Path, num_bytes: int) -> tuple[Path, Path]:
    """The repeated corpus, and its first document alone."""
    data = gzip.decompress((CORPUS / "bible.jsonl.gz").read_bytes())
    corpus, single = folder / "corpus.jsonl", folder / "single.jsonl"
    with corpus.open("wb") as stream:
        while stream.tell() < num_bytes:
            stream.write(data)
    single.write_bytes(data[: data.index(b"\n") + 1])
    return corpus, single


def write_tokenizer(folder: Path) -> Path:
    """The tokenizer in a folder of its own, with the configuration that transformers wants beside it."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((CORPUS / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def rows(folder: Path, tokenizer: Path, megatron: Path | None, workers: int) -> list[Row]:
    """The ways that are compared; the first is what the others are related to."""
    without_fast_engine = folder / "no_gigatoken"
    without_fast_engine.mkdir()
    (without_fast_engine / "gigatoken.py").write_text('raise ImportError("left out on purpose")\n')
    ours = [str(ROOT / "tools" / "preprocess_data.py"), "--tokenizer-model", str(tokenizer), "--append-eod",
            "--workers", str(workers)]  # fmt: skip
    found = [
        Row("megalite", ours, [str(ROOT)]),
        Row("megalite, `tokenizers` alone", ours, [str(without_fast_engine), str(ROOT)]),
    ]
    if megatron is None:
        print("left out: Megatron-LM's tools (give --megatron PATH)")
        return found
    theirs = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer), "--append-eod"]
    for name, extra in (("preprocess_data", ["--workers", str(workers)]),
                        ("preprocess_data_fast", ["--use-gigatoken"])):  # fmt: skip
        command = [str(megatron / "tools" / f"{name}.py"), *theirs, *extra]
        found.append(Row(f"Megatron-LM {name}.py", command, [str(megatron)]))
    return found


def run(row: Row, source: Path, output: Path) -> Seconds:
    """The time of one command and its processes.

    Raises:
        RuntimeError: it failed, with its last line.
    """
    path = os.pathsep.join([*row.path, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *row.command, "--input", str(source), "--output-prefix", str(output)]
    started, before = time.perf_counter(), cores_time()
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    seconds = Seconds(time.perf_counter() - started, cores_time() - before)
    if done.returncode != 0 or not Path(f"{output}_text_document.idx").exists():
        raise RuntimeError((done.stderr.strip() or "no output").splitlines()[-1])
    return seconds


def cores_time() -> float:
    """Seconds that finished children, and theirs, have computed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def fastest(runs: list[Seconds]) -> Seconds:
    """What else the machine does only slows runs down."""
    return Seconds(*map(min, zip(*runs, strict=True)))


def measure(row: Row, corpus: Path, single: Path, folder: Path, repeats: int) -> Measured:
    """The command on both inputs, several times."""
    name = row.name.replace(" ", "-").replace("`", "").replace(",", "")
    startup = fastest([run(row, single, folder / f"{name}-single-{i}") for i in range(repeats)])
    whole = fastest([run(row, corpus, folder / f"{name}-{i}") for i in range(repeats)])
    return Measured(whole, startup, folder / f"{name}-0_text_document")


def same_output(first: Measured, second: Measured) -> str:
    """Whether two commands wrote the same files, in words."""
    same = all(
        filecmp.cmp(f"{first.output}.{kind}", f"{second.output}.{kind}", shallow=False)
        for kind in ("bin", "idx")
    )
    return "same bytes" if same else "OTHER BYTES"


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM that runs with this Python")
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, single = write_inputs(folder, args.megabytes * 1_000_000)
        size = corpus.stat().st_size
        print(f"{size / 1e6:.1f} MB of JSONL, {args.workers} workers, best of {args.repeats}")
        print(f"{'':32} {'whole s':>8} {'start s':>8} {'MB/s':>7} {'ratio':>6} {'MB/s/core':>9} {'ratio':>6}")
        base: Measured | None = None
        for row in rows(folder, write_tokenizer(folder), args.megatron, args.workers):
            try:
                result = measure(row, corpus, single, folder, args.repeats)
            except RuntimeError as error:
                print(f"left out: {row.name} ({error})")
                continue
            base = base or result
            speed, of_base = result.speed(size), base.speed(size)
            print(
                f"{row.name:32} {result.whole.clock:8.1f} {result.startup.clock:8.1f} "
                f"{speed.clock:7.1f} {speed.clock / of_base.clock:6.3f} "
                f"{speed.cores:9.1f} {speed.cores / of_base.cores:6.3f}  {same_output(base, result)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
