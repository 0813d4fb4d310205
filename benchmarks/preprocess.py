"""How fast is preprocessing, beside Megatron-LM's own tools on the same corpus and tokenizer?

The corpus is the one that ships with the repository and the Python sources that are installed beside this
Python, in a fixed random order, repeated to a size if they are less; a byte-level BPE is trained on it.
Another corpus and tokenizer can be given. Each command runs on it and on its first document, which tells what
is start-up; the speed is computed from the remaining time. Programs take turns. It prints medians over the
rounds: of the speeds, and of the ratios to megalite within a round. It also prints the speed per core by CPU
time, which other processes disturb less. It names programs that cannot run.

    python benchmarks/preprocess.py --megatron ../Megatron-LM --rounds 5
    python benchmarks/preprocess.py --megatron ../Megatron-LM --rounds 5 --only fast
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import gzip
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megalite.data.tokenizers.train_tokenizer import read_texts, train_bpe

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "scripts" / "corpus"
NUM_TRAINING_TEXTS = 5000


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


class Round(NamedTuple):
    """A command's time on the corpus and on one document."""

    whole: Seconds
    startup: Seconds

    @property
    def rest(self) -> Seconds:
        """Return the seconds without start-up, by the clock and of all cores."""
        return Seconds(*(max(a - b, 1e-9) for a, b in zip(self.whole, self.startup, strict=True)))


def write_corpus(path: Path, num_bytes: int) -> None:
    """Write documents that exist on every machine, repeated to a size."""
    ours = gzip.decompress((CORPUS / "bible.jsonl.gz").read_bytes()).splitlines()
    texts = [json.loads(line)["text"] for line in ours]
    for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts.append(source.read_text("utf-8"))
    random.Random(0).shuffle(texts)
    with path.open("wb") as stream:
        for text in itertools.cycle(texts):
            if text:
                stream.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            if stream.tell() >= num_bytes:
                return


def write_tokenizer(folder: Path, corpus: Path, vocab_size: int, given: Path | None) -> Path:
    """Write the tokenizer to its own folder, with the configuration that transformers needs."""
    folder.mkdir()
    if given:
        (folder / "tokenizer.json").write_bytes(given.read_bytes())
    else:
        texts = read_texts([str(corpus)], "text", max_documents=NUM_TRAINING_TEXTS)
        (folder / "tokenizer.json").write_bytes(train_bpe(texts, vocab_size).content)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rows(folder: Path, tokenizer: Path, megatron: Path | None, workers: int) -> list[Row]:
    """Return the ways that are compared; the others are related to the first."""
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
    """Return the time of one command and its processes.

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
    """Return the seconds that finished children, and theirs, have computed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def output_of(row: Row, folder: Path) -> Path:
    """Return the prefix that a row writes to."""
    return folder / row.name.translate({ord(c): "-" for c in " `,"})


def one_round(row: Row, corpus: Path, single: Path, folder: Path) -> Round:
    """Return the command on both inputs; what an earlier round has written is in nobody's way."""
    output = output_of(row, folder)
    for old in folder.glob(f"{output.name}*_text_document*"):
        old.unlink()
    startup = run(row, single, Path(f"{output}-single"))
    return Round(run(row, corpus, output), startup)


def same_output(first: Row, second: Row, folder: Path) -> str:
    """Return whether two commands wrote the same files, in words."""
    same = all(
        filecmp.cmp(*(f"{output_of(row, folder)}_text_document.{kind}" for row in (first, second)), False)
        for kind in ("bin", "idx")
    )
    return "same bytes" if same else "OTHER BYTES"


def take_turns(
    found: list[Row], corpus: Path, single: Path, folder: Path, rounds: int
) -> dict[str, list[Round]]:
    """Return all ways in each round, so that what slows the machine down slows all of them down."""
    results: dict[str, list[Round]] = {row.name: [] for row in found}
    for _ in range(rounds):
        for row in found:
            if row.name not in results:
                continue
            try:
                results[row.name].append(one_round(row, corpus, single, folder))
            except RuntimeError as error:
                print(f"left out: {row.name} ({error})")
                del results[row.name]
    return results


def print_table(results: dict[str, list[Round]], size: int, same: dict[str, str]) -> None:
    """Print the medians of each program's seconds, and of their ratios to the first program."""
    base = next(iter(results.values()))
    print(f"{'':37}{'median of a round':^35}  {'megalite is so many times as fast':^33}")
    print(f"{'':37}{'whole s':>8}{'start s':>8}{'MB/s':>8}{'/core':>7}{'clock':>13}{'cores':>9}{'whole':>9}")
    for name, rounds in results.items():
        rest = [each.rest for each in rounds]
        columns = (
            (each.whole.clock for each in rounds),
            (each.startup.clock for each in rounds),
            (size / 1e6 / each.clock for each in rest),
            (size / 1e6 / each.cores for each in rest),
            (mine.clock / ours.rest.clock for mine, ours in zip(rest, base, strict=True)),
            (mine.cores / ours.rest.cores for mine, ours in zip(rest, base, strict=True)),
            (mine.whole.clock / ours.whole.clock for mine, ours in zip(rounds, base, strict=True)),
        )
        values = "{:8.1f}{:8.1f}{:8.1f}{:7.1f}{:13.2f}{:9.2f}{:9.2f}".format(*map(statistics.median, columns))
        print(f"{name:37}{values}  {same[name]}")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM that runs with this Python")
    parser.add_argument("--corpus", type=Path, help="JSONL to use instead of what is at hand")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of training one")
    parser.add_argument("--vocab-size", type=int, default=50_257, help="of the one that is trained")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="of the other ways only those with this in their names")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, single = args.corpus or folder / "corpus.jsonl", folder / "single.jsonl"
        if not args.corpus:
            write_corpus(corpus, args.megabytes * 1_000_000)
        with corpus.open("rb") as stream:
            single.write_bytes(stream.readline())
        tokenizer = write_tokenizer(folder / "tokenizer", corpus, args.vocab_size, args.tokenizer)
        first, *others = rows(folder, tokenizer, args.megatron, args.workers)
        found = [first, *(row for row in others if args.only is None or args.only in row.name)]
        size = corpus.stat().st_size
        print(f"{size / 1e6:.1f} MB of JSONL, {args.workers} workers, {args.rounds} rounds", flush=True)
        results = take_turns(found, corpus, single, folder, args.rounds)
        same = {row.name: same_output(first, row, folder) for row in found if row.name in results}
        print_table(results, size, same)


if __name__ == "__main__":
    main()
