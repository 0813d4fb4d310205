"""How fast does `megalite prepare` sign documents, or write a corpus, beside datatrove?

The texts are random parts of the corpus that ships with the repository, with a twentieth of their words
replaced. Both programs read the same JSONL and write keys of 14 bands of 8 values; datatrove, if it is
installed with its word tokenizer (spacy), is used with its defaults. Programs take turns, each in a new
process. It prints medians over the rounds: megabytes of text per second of wall and of CPU time; start-up,
measured with one document, is subtracted. With --whole, both remove near duplicates and write tokens by two
processes: the whole of megalite's command, and datatrove's four stages with its MegatronDocumentTokenizer.

    python benchmarks/corpus.py --megabytes 24
    python benchmarks/corpus.py --megabytes 24 --whole --python VENV/bin/python
    python benchmarks/corpus.py --megabytes 240 --only megalite
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megalite.data.tokenizers.train_tokenizer import read_texts, train_bpe

ROOT = Path(__file__).parents[1]
DATATROVE = """
import json, sys
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
texts = (json.loads(line)["text"] for path in sys.argv[2:] for line in open(path))
documents = (Document(text=text, id="") for text in texts)
MinhashDedupSignature(sys.argv[1]).run(documents)
"""


WHOLE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import minhash
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
texts, out, tokenizer = sys.argv[1:]
stages = [
    ([JsonlReader(texts), minhash.MinhashDedupSignature(f"{out}/signatures")], 4),
    ([minhash.MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets")], 14),
    ([minhash.MinhashDedupCluster(f"{out}/buckets", f"{out}/ids")], 1),
    (
        [
            JsonlReader(texts),
            minhash.MinhashDedupFilter(f"{out}/ids"),
            MegatronDocumentTokenizer(f"{out}/tokens", tokenizer_name_or_path=tokenizer),
        ],
        4,
    ),
]
if __name__ == "__main__":
    for number, (steps, tasks) in enumerate(stages):
        LocalPipelineExecutor(steps, tasks=tasks, workers=2, logging_dir=f"{out}/logs/{number}").run()
"""


def write_texts(folder: Path, num_bytes: int) -> None:
    """Write four files of documents of 50 to 600 words."""
    chance = random.Random(1)
    with gzip.open(ROOT / "scripts" / "corpus" / "bible.jsonl.gz", "rt") as lines:
        words = " ".join(json.loads(line)["text"] for line in lines).split()
    folder.mkdir()
    for number in range(4):
        with open(folder / f"{number}.jsonl", "w") as stream:
            while stream.tell() < num_bytes / 4:
                count, first = chance.randrange(50, 600), chance.randrange(len(words) - 600)
                text = words[first : first + count]
                for _ in range(count // 20):
                    text[chance.randrange(count)] = chance.choice(words)
                stream.write(f"{json.dumps({'text': ' '.join(text)})}\n")


def megalite(folder: Path, workers: int, *, tokenizer: Path | None = None) -> list[str]:
    """Return the command that runs the pass sign, or all passes with this tokenizer."""
    settings = {"input": str(folder), "output": f"{folder}-{workers}/c", "steps": ["exact", "minhash"]}
    kind = (
        {"type": "byte"} if tokenizer is None else {"type": "HuggingFaceTokenizer", "model": str(tokenizer)}
    )
    config = Path(f"{folder}.yaml")
    config.write_text(json.dumps(settings | {"tokenizer": kind}))
    command = [sys.executable, str(ROOT / "tools" / "prepare_corpus.py"), "--config", str(config)]
    return [*command, "--workers", str(workers), *(() if tokenizer else ("--pass", "sign"))]


def datatrove(folder: Path, python: str, *, tokenizer: Path | None = None) -> list[str]:
    """Return the command that writes datatrove's signatures, or all stages with this tokenizer."""
    if tokenizer is None:
        return [python, "-c", DATATROVE, f"{folder}-signatures", *sorted(map(str, folder.iterdir()))]
    program = Path(f"{folder}-whole.py")  # its processes import it
    program.write_text(WHOLE)
    return [python, str(program), str(folder), f"{folder}-signatures", str(tokenizer)]


def seconds(command: list[str], outputs: list[Path]) -> tuple[float, float]:
    """Run a command, and return its wall and CPU time."""
    for output in outputs:
        subprocess.run(["rm", "-rf", str(output)], check=True)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="write the corpus, with a BPE of 10,000 tokens")
    parser.add_argument("--python", default=sys.executable, help="Python that has datatrove")
    parser.add_argument("--only", choices=("megalite", "datatrove"), default="", help="one of the programs")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        whole, one = Path(name, "whole"), Path(name, "one")
        write_texts(whole, flags.megabytes * 10**6)
        write_texts(one, 4)
        size = sum(file.stat().st_size for file in whole.iterdir()) / 1e6
        runs: dict[str, tuple[Callable[..., list[str]], Any]] = {
            "megalite": (megalite, 1),
            "megalite, 2 processes": (megalite, 2),
            "datatrove": (datatrove, flags.python),
        }
        if flags.whole:
            tokenizer = Path(name, "tokenizer.json")
            tokenizer.write_bytes(
                train_bpe(read_texts([str(whole)], "text", max_documents=5000), 10_000).content
            )
            runs = {
                "megalite, whole": (partial(megalite, tokenizer=tokenizer), 2),
                "datatrove, whole": (partial(datatrove, tokenizer=tokenizer), flags.python),
            }
        rates: dict[str, list[tuple[float, float]]] = {}
        runs = {label: run for label, run in runs.items() if label.startswith(flags.only)}
        for _ in range(flags.rounds):
            for label, (command, argument) in runs.items():
                outputs = [
                    Path(f"{folder}{end}") for folder in (one, whole) for end in ("-1", "-2", "-signatures")
                ]
                try:
                    startup = (0.0, 0.0) if flags.whole else seconds(command(one, argument), outputs)
                    total = seconds(command(whole, argument), outputs)
                except subprocess.CalledProcessError as error:
                    print(f"{label} cannot run: exit status {error.returncode}")
                    continue
                found = tuple(size / (a - b) for a, b in zip(total, startup, strict=True))
                rates.setdefault(label, []).append(found)
        for label, found in rates.items():
            wall, cpu = (statistics.median(values) for values in zip(*found, strict=True))
            # datatrove does not wait for its processes, so that their time is unknown.
            of_cpu = "" if flags.whole else f"{cpu:8.1f} MB/s of CPU time"
            print(f"{label:24}{wall:8.1f} MB/s{of_cpu}")
        first, *others = rates
        for label in others:
            pairs = zip(rates[first], rates[label], strict=True)
            wall, cpu = (
                statistics.median(values)
                for values in zip(*((a[0] / b[0], a[1] / b[1]) for a, b in pairs), strict=True)
            )
            print(f"{first} / {label:21}{wall:8.2f}" + ("" if flags.whole else f"{cpu:13.2f}"))


if __name__ == "__main__":
    main()
