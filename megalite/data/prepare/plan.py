"""Read the settings of a corpus, and divide its input into pieces that do not depend on who works on them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megalite.data.prepare.steps import CorpusStep, build_settings, read_steps
from megalite.data.preprocessing.documents import STANDARD_INPUT, file_states, find_inputs
from megalite.data.preprocessing.input_plan import InputPiece, InputPlan, PreprocessJob
from megalite.data.tokenizers.tokenizer import TokenizerFiles, tokenizer_digest
from megalite.utils.errors import ConfigError, UserError, collected
from megalite.utils.files import make_writable, read_yaml_file, url_problem
from megalite.utils.object_store import ObjectFolder, is_object_url, is_remote

PASSES = ("sign", "match", "tokenize", "shard", "finish")
"""The passes in order: hash, find duplicates, tokenize what is kept, shuffle, and write list and report."""
SUBMITTED_OPTIONS = ("array", "dependency", "job-name", "kill-on-invalid-dep", "output", "wrap")
"""The options of sbatch that megalite sets."""
_FILES_VERSION = 2
"""Version of the files between passes: one that another version wrote is not read."""
_RANGE_BYTES = 32 << 20
_MAX_RANGES = 4096


@dataclass(frozen=True)
class TokenizerSettings:
    """The tokenizer, with the names of preprocessing's flags; see `TokenizerFiles`."""

    type: str | None = None
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    name_or_path: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class RunSettings:
    """How to run, which does not change the output."""

    workers: int | None = None
    """Number of processes; None for one per core. In Slurm, each is a job."""
    executor: Literal["local", "slurm", "ray"] = "local"
    partition: str | None = None
    """Slurm's partition."""
    time: str | None = None
    """Slurm's time limit of a pass."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Other options of sbatch, such as account and mem; not `SUBMITTED_OPTIONS`."""
    folder: str | None = None
    """Folder of work in progress, which all tasks see, for an output in object storage."""


@dataclass(frozen=True)
class CorpusJob:
    """Settings of a corpus. The fields are the keys of its YAML file."""

    input: tuple[str, ...]
    """Files, globs and folders, also URLs."""
    output: str
    """Prefix of the output, also in object storage."""
    tokenizer: TokenizerSettings
    steps: tuple[CorpusStep, ...] = ()
    text: str = "text"
    """Key or column of the text."""
    metadata: tuple[str, ...] = ()
    """Other keys, for filters of datatrove."""
    append_eod: bool = True
    special_tokens_in_text: Literal["keep", "escape", "drop"] = "keep"
    """What becomes of the name of a special token in a text."""
    shuffle: int | None = field(default=None, metadata={"least": 0})
    """Seed of the order of documents; None to keep the order of the input."""
    shards: int = field(default=1, metadata={"most": 99_999})
    text_documents: Literal["file", "line"] = "file"
    max_document_bytes: int = PreprocessJob.max_document_bytes
    on_error: Literal["fail", "skip"] = "fail"
    run: RunSettings = RunSettings()

    @property
    def prefix(self) -> str:
        """Return the prefix under which files are written: the output, or its name in the run's folder."""
        return self.output if self.run.folder is None else f"{self.run.folder}/{self.output_name}"

    @property
    def output_url(self) -> str | None:
        """Return the URL of the folder of the output; None if it is on this machine."""
        return self.output.rpartition("/")[0] if is_object_url(self.output) else None

    @property
    def output_name(self) -> str:
        """Return the last part of the output's prefix."""
        return self.output.rpartition("/")[2]

    @cached_property
    def source(self) -> PreprocessJob:
        """Return how documents are read and tokenized."""
        files = {key: value for key, value in asdict(self.tokenizer).items() if key not in ("type", "model")}
        return PreprocessJob(
            inputs=self.input,
            output_prefix=self.prefix,
            tokenizer_type=self.tokenizer.type,
            tokenizer_files=TokenizerFiles(tokenizer_model=self.tokenizer.model, **files),
            json_keys=(self.text, *self.metadata),
            append_eod=self.append_eod,
            text_documents=self.text_documents,
            max_document_bytes=self.max_document_bytes,
            skip_bad_records=self.on_error == "skip",
        )

    @property
    def dedup(self) -> dict[str, int]:
        """Return the numbers of the steps that compare documents, by name."""
        return {step.name: i for i, step in enumerate(self.steps) if not step.is_filter}

    @property
    def early(self) -> range:
        """Return the numbers of the filters before deduplication; without it, of all."""
        return range(min(self.dedup.values(), default=len(self.steps)))

    @property
    def late(self) -> range:
        """Return the numbers of the filters after deduplication."""
        return range(max(self.dedup.values(), default=len(self.steps)) + 1, len(self.steps))

    def identity(self) -> dict[str, Any]:
        """Return what the output depends on besides files and versions, by setting.

        Raises:
            UserError: there is no such tokenizer, or it cannot end documents.
        """
        tokenizer = self.source.build_tokenizer()
        if self.append_eod:
            _ = tokenizer.eod  # raises if the vocabulary has none
        plain = asdict(self)
        for key in ("input", "output", "run"):
            del plain[key]
        steps = [[step.name, asdict(step)] for step in self.steps]
        return plain | {"steps": steps, "tokenizer": tokenizer_digest(tokenizer)}


def read_corpus_job(path: str) -> CorpusJob:
    """Read the settings of a corpus from a YAML file.

    Raises:
        ConfigError: lists all mistakes in it.
    """
    settings = read_yaml_file(f"--config {path}", path)
    if not isinstance(settings, dict):
        raise UserError(f"--config {path} has no settings: write `key: value` lines")
    problems: list[str] = []
    steps = read_steps(settings.pop("steps", None) or [], problems)
    run = settings.get("run")
    if isinstance(run, dict) and type(run.get("time")) is int:  # YAML reads 4:00:00 as seconds
        run["time"] = str(-(-run["time"] // 60))  # and Slurm reads a number as minutes
    job = build_settings(CorpusJob, path, settings, problems, steps=steps)
    if job and job.run.executor != "slurm":
        given = [name for name in ("partition", "time", "sbatch") if getattr(job.run, name)]
        problems += [f"{path}: run: {name} has no effect without executor: slurm" for name in given]
    for key in job.run.sbatch if job else ():
        if key in SUBMITTED_OPTIONS:
            problems.append(
                f"{path}: run: sbatch: remove {key}: megalite sets {', '.join(SUBMITTED_OPTIONS)}"
            )
        elif key in ("partition", "time"):
            problems.append(f"{path}: run: sbatch: remove {key}, and write run: {key}")
    if job is None or problems:
        raise ConfigError(problems)
    return job


@dataclass(frozen=True)
class CorpusPlan:
    """The pieces of a corpus, and where its passes write.

    Attributes:
        identity: what the output depends on, as JSON.
        states: size and version of each input file.
        pieces: parts of the input, the tasks of the passes sign and tokenize.
        num_ranges: number of ranges of keys, the tasks of the pass match.
    """

    job: CorpusJob
    identity: dict[str, Any]
    states: dict[str, Any]
    pieces: tuple[InputPiece, ...]
    num_ranges: int

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything that the output depends on."""
        record = [self.identity, self.states]
        return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def folder(self) -> Path:
        return Path(f"{self.job.prefix}.unfinished")

    def num_tasks(self, name: str) -> int:
        sizes = {"match": self.num_ranges, "shard": self.job.shards, "finish": 1}
        return sizes.get(name, len(self.pieces))

    def path(self, name: str, number: int, kind: str) -> Path:
        """Return the path of a file of one task."""
        return self.folder / name / f"{number:06}.{kind}"

    def done_path(self, name: str, number: int) -> Path:
        """Return the path of the file that a task writes last: its name depends on all that it read."""
        key = hashlib.sha256(f"{self._tasks_digest}/{name}/{number}".encode()).hexdigest()[:16]
        return self.path(name, number, f"{key}.json")

    def tasks_left(self, name: str, numbers: Iterable[int]) -> list[int]:
        """Return those of a pass's tasks that are not done."""
        return [number for number in numbers if not self.done_path(name, number).exists()]

    @cached_property
    def _tasks_digest(self) -> str:
        """Return a digest of the work: another version of megalite may divide the same input differently."""
        tasks = f"{_FILES_VERSION} {self.digest} {self.num_ranges} {self.pieces}"
        return hashlib.sha256(tasks.encode()).hexdigest()

    def check_input(self, piece: InputPiece) -> None:
        """Check that the files of a piece are those that were planned.

        Raises:
            UserError: one has changed.
        """
        files = getattr(piece, "files", None) or (getattr(piece, "path", ""),)
        for file, state in zip(files, file_states(files), strict=True):
            if list(state) != self.states[file]:
                raise UserError(f"{file} has changed since the corpus was planned: {self.start_again}")

    @property
    def start_again(self) -> str:
        return "start again with --overwrite, or restore it"


def make_plan(job: CorpusJob) -> CorpusPlan:
    """Find the input files and divide them.

    Raises:
        ConfigError: lists what is wrong: no input, one file twice, no tokenizer, a step that cannot start, or
            an output that cannot be written.
    """
    problems: list[str] = []
    files: list[str] = []
    identity: dict[str, Any] = {}
    source = job.source
    with collected(problems):
        _check_output(job)
    with collected(problems):
        files = find_inputs(source.inputs)
        _check_distinct(files)
    with collected(problems):
        identity = job.identity()
    for i, step in enumerate(job.steps, 1):
        with collected(problems):
            step.start()
            identity[f"step {i}, {step.name}: its files and versions"] = step.identity()
    if problems:
        raise ConfigError([_named_like_settings(problem) for problem in problems])
    found = file_states(files)
    states = {file: list(state) for file, state in zip(files, found, strict=True)}
    pieces = tuple(InputPlan(source, files, stream_compressed=False, states=found).pieces())
    if not pieces:
        raise UserError("input has no text: it names no files, or empty ones")
    size = sum(piece.num_input_bytes for piece in pieces)
    num_ranges = min(max(1, size // _RANGE_BYTES), _MAX_RANGES) if job.dedup else 0
    return CorpusPlan(job, identity, states, pieces, num_ranges)


def _check_output(job: CorpusJob) -> None:
    """Check that the output can be written, before any work is done."""
    if problem := "" if job.output_url else url_problem(job.output):
        raise UserError(f"output: {problem}, or s3://BUCKET/NAME, gs://... or az://...")
    if (job.output_url is None) != (job.run.folder is None):
        what = "is for an output in object storage: remove it"
        if job.output_url:
            what = f"is missing: work in progress for {job.output} needs a folder that all tasks see"
        raise UserError(f"run: folder {what}")
    make_writable(Path(job.prefix).absolute().parent, "run: folder" if job.output_url else "output")
    if job.output_url:
        trial = f"{job.output_name}.unfinished"
        try:
            objects = ObjectFolder(job.output_url)
            objects.write(trial, b"")
            objects.delete([trial])
        except OSError as error:
            raise UserError(f"output: {error.filename} cannot be written ({error.strerror})") from None


def _check_distinct(files: list[str]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        if file == STANDARD_INPUT:
            raise UserError("input: standard input can be read only once: write it to a file")
        real = file if is_remote(file) else os.path.realpath(file)
        if real in seen:
            other = "twice" if seen[real] == file else f"and {seen[real]}, which are one file"
            raise UserError(f"input names {file} {other}: remove one")
        seen[real] = file


def _named_like_settings(problem: str) -> str:
    """Return a message about a flag of preprocessing with the name of the setting."""
    names = {"--input ": "input: ", "--tokenizer-type": "tokenizer: type", "--tokenizer-model": "model"}
    for flag, name in names.items():
        problem = problem.replace(flag, name)
    return problem
