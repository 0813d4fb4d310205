"""Turn text files into indexed datasets: cut the input, encode in worker processes, join in order.

`Ledger` records finished pieces on disk, beside their shards, so that a killed run can resume.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.indexed_dataset import replace_dataset, token_dtype
from megalite.data.loss_mask import LOSS_MASK
from megalite.data.preprocessing.documents import (
    FileState,
    file_states,
    find_inputs,
    input_kind,
    is_compressed,
)
from megalite.data.preprocessing.encoder import (
    MAX_MESSAGES,
    CannotWrite,
    ColumnResult,
    Encoder,
    PieceResult,
    sentence_splitter,
)
from megalite.data.preprocessing.input_plan import (
    PIECES_VERSION,
    InputPiece,
    InputPlan,
    PreprocessJob,
    locate,
)
from megalite.data.preprocessing.pool import WorkerDied, WorkerPool
from megalite.data.preprocessing.preprocessing_report import (
    ColumnTotal,
    DatasetReport,
    PreprocessingProgress,
    digests,
    name_histogram,
    read_report,
)
from megalite.data.preprocessing.shards import Extent, join_index, join_tokens
from megalite.data.tokenizers.chat_template import chat_template_of
from megalite.data.tokenizers.tokenizer import Tokenizer, write_tokenizer_digest
from megalite.utils.errors import ConfigError, UserError, collected
from megalite.utils.files import no_follow, open_new, parse_json, replace_file, url_problem
from megalite.utils.log import log

OnProgress = Callable[[PreprocessingProgress], None]


@dataclass(frozen=True)
class PreprocessingSummary:
    """Summary of a finished run.

    Attributes:
        progress: progress at its end.
        reports: one report for each key.
        was_complete: whether an earlier run of the same job had finished, so there was nothing to resume.
    """

    progress: PreprocessingProgress
    reports: tuple[DatasetReport, ...]
    was_complete: bool = False


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def preprocess(job: PreprocessJob, on_progress: OnProgress | None = None) -> PreprocessingSummary:
    """Tokenize all documents; each output appears under its name once it is complete.

    A killed run leaves the folder {stem}.unfinished, from which a run with `resume` continues. A run that
    fails leaves nothing; if it had resumed an earlier run, it leaves the finished pieces.

    Args:
        on_progress: called after each piece of the input.

    Raises:
        ConfigError: lists all mistakes of the job: no tokenizer, a missing input, a URL as output.
        UserError: an input cannot be read, the output exists or cannot be written, a record is bad (unless
            bad records are skipped), there are no documents, or the run to resume was another job.
    """
    tokenizer, files = _tokenizer_and_files(job)
    states = file_states(files)
    made_with = job.made_with(files, states, tokenizer)
    finished = _finished_before(job, made_with)
    if finished:
        with Ledger(job.stem):  # removes the files of a run that was killed at its very end
            return finished
    with Ledger(job.stem) as ledger:
        plan = _plan(job, ledger, files, states, made_with)
        run = _Run(job, on_progress or (lambda progress: None))
        run.progress.total_input_bytes = plan.total_bytes
        pieces = plan.pieces()
        try:
            if job.resume and ledger.header:
                run.skip(ledger.resume(), pieces)
            else:
                header = {"stream_compressed": plan.stream_compressed, "pieces": PIECES_VERSION}
                ledger.start({"identity": made_with, **header})
            run.encode(ledger, pieces)
            reports = run.write(ledger.folder, tokenizer, made_with)
        except CannotWrite as error:
            raise UserError(f"{error}; {ledger.on_failure}") from None
    return PreprocessingSummary(run.progress, tuple(reports))


def problems_of(job: PreprocessJob) -> list[str]:
    """Return the mistakes in a job that `preprocess` would raise before it starts."""
    problems: list[str] = []
    with collected(problems):
        _tokenizer_and_files(job)
    return problems


def _tokenizer_and_files(job: PreprocessJob) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer and the input files of a job; raise all mistakes at once."""
    problems: list[str] = []
    tokenizer: Tokenizer | None = None
    files: list[str] = []
    if problem := url_problem(job.output_prefix):
        problems.append(f"--output-prefix {problem}")
    with collected(problems):
        tokenizer = job.build_tokenizer()
        if job.append_eod:
            _ = tokenizer.eod  # raises if the vocabulary has none
    if job.sentence_language:
        with collected(problems):
            sentence_splitter(job.sentence_language, job.keep_newlines)
    if job.chat and tokenizer is not None:
        with collected(problems):
            chat_template_of(tokenizer, job.now)
    with collected(problems):
        files = find_inputs(job.inputs)
        if job.chat and (other := next((f for f in files if input_kind(f, "file") != "json"), None)):
            problems.append(f"--chat reads conversations from JSONL, and {other} is not: convert it")
    if tokenizer is None or problems:
        raise ConfigError(problems)
    return tokenizer, files


def _plan(
    job: PreprocessJob,
    ledger: Ledger,
    files: list[str],
    states: list[FileState],
    made_with: dict[str, Any],
) -> InputPlan:
    """Plan a new run, or repeat the plan of the run to resume; do not replace existing output."""
    before = ledger.header
    if before and not job.resume and not job.overwrite:
        raise UserError(
            f"{ledger.folder} belongs to an interrupted run: continue it with --resume, or start again with "
            "--overwrite"
        )
    if before and job.resume:
        if before.get("pieces") != PIECES_VERSION:
            raise UserError(
                f"the interrupted run in {ledger.folder} is of another version of megalite: start again with "
                "--overwrite and without --resume"
            )
        for flag, value in made_with.items():
            if before["identity"].get(flag) != value:
                was = before["identity"].get(flag)
                detail = (
                    "" if flag in ("--input", "--tokenizer-type", "--chat") else f": {was}, and now {value}"
                )
                raise UserError(
                    f"the interrupted run in {ledger.folder} had another {flag}{detail}; "
                    "resume with the same one, or start again with --overwrite and without --resume"
                )
        return InputPlan(job, files, before["stream_compressed"], states)
    for key in job.json_keys:
        for name in (f"{job.prefix(key)}.bin", f"{job.prefix(key)}.idx"):
            if os.path.exists(name) and not job.overwrite:
                raise UserError(f"{name} exists: pass another --output-prefix, or --overwrite")
    return InputPlan(job, files, sum(map(is_compressed, files)) < 2 * job.workers, states)


def _finished_before(job: PreprocessJob, made_with: dict[str, Any]) -> PreprocessingSummary | None:
    """Return the summary of the same job if --resume finds that an earlier run has finished it."""
    reports = [read_report(job.prefix(key)) for key in job.json_keys if job.resume]
    if not reports or not all(
        report and report.get("made_with") == made_with and os.path.exists(f"{report['prefix']}.idx")
        for report in reports
    ):
        return None
    whole = tuple(DatasetReport(**report) for report in reports if report)
    num_tokens = sum(report.num_tokens for report in whole)
    return PreprocessingSummary(
        PreprocessingProgress(max(report.num_documents for report in whole), num_tokens), whole, True
    )


class _Run:
    """Results of one run, from its first piece to its datasets."""

    def __init__(self, job: PreprocessJob, on_progress: OnProgress) -> None:
        self._job = job
        self._on_progress = on_progress
        self._started = time.monotonic()
        self._totals = [ColumnTotal() for _ in job.json_keys]
        self._mask = ColumnTotal()
        self.progress = PreprocessingProgress()

    def skip(self, results: Iterator[PieceResult], pieces: Iterator[InputPiece]) -> None:
        """Add the results of finished pieces, and skip these pieces."""
        for result in results:
            piece = next(pieces, None)
            if piece is None or piece.checksum != result.checksum:
                raise UserError(
                    "the input has changed since the interruption: start again with --overwrite and without "
                    "--resume"
                )
            self._add(piece, result)
        progress = self.progress
        progress.num_resumed_bytes = progress.num_bytes
        progress.num_resumed_input_bytes = progress.num_input_bytes
        progress.num_resumed_tokens = progress.num_tokens
        self._started = time.monotonic()

    def encode(self, ledger: Ledger, pieces: Iterator[InputPiece]) -> None:
        workers = self._job.workers
        hint = f"continue with --resume and fewer than --workers {workers}"
        with WorkerPool(partial(Encoder, self._job, ledger.folder), workers, hint) as pool:
            for piece, result in pool.run(pieces):
                ledger.append(result)
                self._add(piece, result)
                self._on_progress(self.progress)

    def _add(self, piece: InputPiece, result: PieceResult) -> None:
        progress = self.progress
        for source, what, number, why in result.bad[: max(0, MAX_MESSAGES - progress.num_skipped)]:
            log.warning("skipped %s, %s %d: %s", source, what, locate(piece, number), why)
        totals = [*self._totals, self._mask] if self._job.chat else self._totals
        for total, column in zip(totals, result.columns, strict=True):
            if column.first_special and not total.first_special:
                source, what, number, token = column.first_special
                total.first_special = f"{token} in {source}, {what} {locate(piece, number)}"
            total.add(column)
        progress.num_documents = max(total.num_documents for total in self._totals)
        progress.num_tokens = sum(total.num_tokens for total in self._totals)
        progress.num_bytes += result.num_bytes
        progress.num_input_bytes += result.num_input_bytes
        progress.num_skipped += result.num_skipped
        progress.num_empty = min(total.num_empty for total in self._totals)
        progress.seconds = time.monotonic() - self._started

    def write(self, folder: str, tokenizer: Tokenizer, made_with: dict[str, Any]) -> list[DatasetReport]:
        """Join the shards, and rename all datasets to their final names, each .idx last."""
        for key, total in zip(self._job.json_keys, self._totals, strict=True):
            if total.num_documents == 0:
                index, count = self._job.partition
                part = f"part {index}/{count} of the input" if count > 1 else "the input"
                hint = ": pass fewer parts in --partition" if count > 1 else ""
                what = "no conversation" if self._job.chat else f"no document with text under the key {key!r}"
                raise UserError(f"{part} has {what}, so nothing is written{hint}")
        try:
            reports = [
                self._write_dataset(Path(folder, str(k)), tokenizer, made_with, k)
                for k in range(len(self._totals))
            ]
            for k, report in enumerate(reports):
                mask = {LOSS_MASK: LOSS_MASK} if self._job.chat else {}
                suffixes = {"bin": "bin", **mask, "tokenizer.json": "tokenizer.json", "json": "report"}
                suffixes["idx"] = "idx"
                files = {suffix: f"{Path(folder, str(k))}.{name}" for suffix, name in suffixes.items()}
                replace_dataset(report.prefix, files)
        except OSError as error:
            raise CannotWrite(f"cannot write {self._job.stem}: {error.strerror}") from None
        self.progress.seconds = time.monotonic() - self._started
        return reports

    def _write_dataset(
        self, path: Path, tokenizer: Tokenizer, made_with: dict[str, Any], k: int
    ) -> DatasetReport:
        total, dtype = self._totals[k], token_dtype(tokenizer.vocab_size)
        join_tokens(str(path.parent), total.extents, dtype.itemsize, f"{path}.bin")
        join_index(str(path.parent), total.extents, dtype, f"{path}.idx")
        write_tokenizer_digest(str(path), tokenizer)
        num_answer_tokens, kinds = None, ["bin", "idx"]
        if self._job.chat:
            kinds.append(LOSS_MASK)
            join_tokens(str(path.parent), self._mask.extents, 1, f"{path}.{LOSS_MASK}")
            num_answer_tokens = int(np.count_nonzero(np.memmap(f"{path}.{LOSS_MASK}", np.uint8, "r")))
        unknown = tokenizer.unk
        report = DatasetReport(
            prefix=self._job.prefix(self._job.json_keys[k]),
            num_documents=total.num_documents,
            num_sequences=total.num_sequences,
            num_tokens=total.num_tokens,
            num_answer_tokens=num_answer_tokens,
            num_ends_in_texts=total.num_ends,
            num_special_in_texts=total.num_special,
            first_special_in_texts=total.first_special,
            num_text_bytes=total.num_text_bytes,
            bytes_per_token=total.num_text_bytes / total.num_tokens,
            num_skipped=self.progress.num_skipped,
            num_empty=total.num_empty,
            unknown_share=None if unknown is None else total.num_unknown / total.num_tokens,
            length_histogram=name_histogram(total.histogram),
            dtype=dtype.name,
            sha256=digests({kind: f"{path}.{kind}" for kind in kinds}),
            made_with=made_with,
        )
        report.write(f"{path}.report")
        return report


class Ledger:
    """Folder STEM.unfinished: a header, a line for each finished piece, and workers' shards.

    Lines are in the pieces' order, so the finished pieces are always the start of the input. A line is
    written after its shards are on disk; a line that a kill has cut off does not count. As a context manager,
    it holds a lock that the system releases when the process ends, and removes the folder on success and on a
    UserError. It keeps the folder if a worker died, or if the folder holds an earlier run's work.

    Attributes:
        header: settings of the interrupted run; empty if no run was interrupted.
    """

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self.folder = f"{stem}.unfinished"
        # Without suffixes, because the folder may be inside an input folder.
        self._header_path = Path(self.folder, "run")
        self._lines_path = Path(self.folder, "done")
        self.header: dict[str, Any] = {}
        self._has_earlier_work = False
        self._lock: Any = None
        self._lines: Any = None

    def __enter__(self) -> Ledger:
        try:
            if os.path.islink(self.folder):  # the folder's files are removed, so it must be this run's own
                raise UserError(
                    f"{self.folder} is a symbolic link: remove it, or pass another --output-prefix"
                )
            os.makedirs(self.folder, exist_ok=True)
            self._lock = open(Path(self.folder, "lock"), "w", opener=no_follow)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"another process is writing {self._stem}: wait for it, or stop it") from None
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror}") from None
        if self._header_path.exists():
            try:
                self.header = parse_json(self._header_path.read_text())
            except ValueError as error:
                raise UserError(
                    f"{self._header_path} is damaged ({error}): remove {self.folder} and start again"
                ) from None
            self._has_earlier_work = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lines:
            self._lines.close()
        refused = kind is not None and issubclass(kind, UserError) and not issubclass(kind, WorkerDied)
        if kind is None or (refused and not self._has_earlier_work):
            self._header_path.unlink(missing_ok=True)  # first, because no run can resume without it
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    @property
    def on_failure(self) -> str:
        """Describe what happens to unfinished work if this run fails, for the error message."""
        if self._has_earlier_work:
            return "finished pieces are kept: continue with --resume"
        return "the unfinished output is removed"

    def start(self, header: dict[str, Any]) -> None:
        """Start a new run; remove an earlier run's files."""
        try:
            for path in Path(self.folder).iterdir():
                if path.name != "lock":
                    path.unlink()
            self._has_earlier_work = False
            self.header = header
            self._lines = open_new(self._lines_path, 0)
            with replace_file(self._header_path) as stream:
                stream.write(json.dumps(header).encode())
        except OSError as error:
            raise CannotWrite(f"cannot write {self.folder}: {error.strerror}") from None

    def resume(self) -> Iterator[PieceResult]:
        """Yield the results of the interrupted run; `append` continues after them."""
        whole = 0
        self._lines = open(self._lines_path, "r+b", buffering=0, opener=no_follow)
        with open(self._lines_path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                yield _from_json(parse_json(line))
        self._lines.truncate(whole)
        self._lines.seek(whole)

    def append(self, result: PieceResult) -> None:
        try:
            self._lines.write(json.dumps(asdict(result)).encode() + b"\n")
        except OSError as error:
            raise CannotWrite(f"cannot write {self.folder}: {error.strerror}") from None


def _from_json(fields: dict[str, Any]) -> PieceResult:
    columns = []
    for column in fields.pop("columns"):
        shard, *spans = column.pop("extent")
        columns.append(ColumnResult(Extent(shard, *map(tuple, spans)), **column))
    bad = [tuple(record) for record in fields.pop("bad")]
    return PieceResult(columns=columns, bad=bad, **fields)
