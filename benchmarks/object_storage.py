"""How fast are samples read from a store that answers after 50 ms, with nothing in the cache?

This process serves a corpus of random tokens in shards from memory. Each program reads the first samples of a
shuffled epoch, in microbatches of 4 samples of 2,048 tokens, in a new process and an empty folder; programs
take turns. It prints medians over the rounds: tokens per second from the opening of the corpus to the last
sample, the bytes that the store sent for each byte of the samples, and the process's memory. megatron-core
reads a shard of 256 MiB for almost every sample, so it reads fewer of them.

    python -m benchmarks.object_storage
    python -m benchmarks.object_storage --python VENV/bin/python --only megalite,streaming

VENV has megalite's packages, boto3, megatron-core and mosaicml-streaming: programs without theirs are named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.loader import write_corpus
from megalite.data.dataset_merge import list_shards
from tests.object_server import ObjectServer, object_server, settings_for

LENGTH, BATCH, SHARDS = 2048, 4, 4
ROOT = Path(__file__).parents[1]
MEGALITE = """
from functools import partial
import numpy as np, torch
from megalite.data.batch_loader import Prefetcher, read_microbatch
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.samples import GPTSamples
from megalite.data.sharded_dataset import open_dataset
from megalite.data.window_dataset import WindowDataset

def batches(count):
    corpus = open_dataset("s3://b/corpus", checks_index=not WINDOWS)
    whole, cpu = range(len(corpus)), torch.device("cpu")
    if WINDOWS:
        dataset = WindowDataset(corpus, whole, count, 2048, 1, shuffle_block=64)
    else:
        dataset = GPTDataset(corpus, whole, count, 2048, 1)
    read = partial(read_microbatch, dataset, cpu, GPTSamples(0, seed=0), None)
    prefetcher = Prefetcher(read, count, 4, cpu)
    for first in range(0, count, 4):
        yield prefetcher.take(np.arange(first, first + 4)).tokens
    prefetcher.close()
"""
PROGRAMS = {
    "megalite, windows": (MEGALITE.replace("WINDOWS", "True"), 1),
    "megalite, documents": (MEGALITE.replace("WINDOWS", "False"), 4),
    "mosaicml-streaming": (
        """
import logging
from streaming import StreamingDataset
from torch.utils.data import DataLoader
logging.disable()

def batches(count):
    dataset = StreamingDataset(remote="s3://b/mds", local="mds", shuffle=True, batch_size=4)
    for number, batch in enumerate(DataLoader(dataset, batch_size=4)):
        if number * 4 >= count:
            return
        yield batch["tokens"]
""",
        1,
    ),
    "megatron-core": (
        """
from types import SimpleNamespace
import numpy as np, torch
from megatron.core.datasets import gpt_dataset, indexed_dataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
from megatron.core.datasets.utils import Split

def batches(count):
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1, sequence_length=2048, blend=(["s3://b/shard-0"], None), split="1",
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=50000, pad=50001, vocab_size=50002, unique_identifiers={}),
        path_to_cache="cache",
    )
    storage = ObjectStorageConfig(path_to_idx_cache="idx")
    source = indexed_dataset.IndexedDataset("s3://b/shard-0", mmap=False, object_storage_config=storage)
    ids = np.arange(len(source), dtype=np.int32)
    dataset = gpt_dataset.GPTDataset(source, "s3://b/shard-0", ids, None, Split.train, config)
    for first in range(0, count, 4):
        yield torch.stack([dataset[i]["tokens"] for i in range(first, first + 4)])
""",
        256,
    ),
}
"""The batches of each program, and by how much it reads fewer samples than the fastest."""
TIMED = """
import json, resource, sys, time
begin, count, num_tokens = time.perf_counter(), int(sys.argv[1]), 0
for tokens in batches(count):
    num_tokens += tokens.numel()
assert num_tokens >= count * 2048, num_tokens
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([count * 2048 / seconds, peak]))
"""
WRITE_MDS = """
import sys
import numpy as np
from streaming import MDSWriter
tokens = np.concatenate([np.fromfile(path, np.uint16) for path in sys.argv[2:]])
with MDSWriter(out=sys.argv[1], columns={"tokens": "ndarray:uint16:2049"}) as writer:
    for begin in range(0, len(tokens) - 2049, 2048):
        writer.write({"tokens": tokens[begin : begin + 2049]})
"""


def fill(server: ObjectServer, folder: Path, num_tokens: int, python: str) -> None:
    """Serve a corpus in shards, and the same tokens in the format of mosaicml-streaming."""
    names = [str(folder / f"shard-{number}") for number in range(SHARDS)]
    for seed, name in enumerate(names):
        write_corpus(name, num_tokens // SHARDS, seed)
    list_shards(names, str(folder / "corpus"))
    files = [f"{name}.bin" for name in names]
    subprocess.run([python, "-c", WRITE_MDS, str(folder / "mds"), *files], check=False, capture_output=True)
    for path in filter(Path.is_file, folder.rglob("*")):
        server.objects[f"b/{path.relative_to(folder)}"] = path.read_bytes()


def measure(server: ObjectServer, python: str, program: str, num_samples: int) -> tuple[float, ...]:
    """Return tokens per second, bytes sent for each byte of the samples, and MB of memory.

    Raises:
        CalledProcessError: the program cannot run.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | settings_for(server.url) | {"TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        environment |= {"S3_ENDPOINT_URL": server.url, "AWS_DEFAULT_REGION": "r", "OMP_NUM_THREADS": "1"}
        server.requests.clear()
        command = [python, "-c", program + TIMED, str(num_samples)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment, cwd=folder
        )
        rate, peak = json.loads(done.stdout.splitlines()[-1])
    sent = sum(each.end - each.begin for each in server.requests if each.method == "GET")
    return rate, sent / (2 * LENGTH * num_samples), peak


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=600_000_000)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="parts of names of programs, separated by commas")
    parser.add_argument("--python", default=sys.executable, help="Python that has the programs' packages")
    flags = parser.parse_args()
    chosen = [name for name in PROGRAMS if any(part in name for part in flags.only.split(","))]
    found = defaultdict[str, list[tuple[float, ...]]](list)
    with object_server() as server, tempfile.TemporaryDirectory() as name:
        fill(server, Path(name), flags.tokens, flags.python)
        server.delay = flags.latency
        for _ in range(flags.rounds):
            for name in chosen:
                program, share = PROGRAMS[name]
                count = flags.samples // share // BATCH * BATCH
                try:
                    found[name].append(measure(server, flags.python, program, count))
                except subprocess.CalledProcessError as error:
                    print(f"{name} cannot run: {error.stderr.strip().splitlines()[-1]}", flush=True)
    for name, rounds in filter(lambda item: item[1], found.items()):
        rate, times, peak = map(statistics.median, zip(*rounds, strict=True))
        print(f"{name:24}{rate:14,.0f} tokens/s{times:10.2f} bytes a byte{peak:8.0f} MB")


if __name__ == "__main__":
    main()
