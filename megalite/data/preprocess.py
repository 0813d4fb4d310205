"""Text files to indexed datasets: cuts the input up, encodes in worker processes, joins in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.data.documents import find_inputs, is_compressed
from megalite.data.indexed_writer import token_dtype
from megalite.data.preprocessing.encoder import MAX_MESSAGES, CannotWrite, PieceResult
from megalite.data.preprocessing.job import PreprocessJob
from megalite.data.preprocessing.join import join
from megalite.data.preprocessing.ledger import Ledger
from megalite.data.preprocessing.pieces import Piece, locate
from megalite.data.preprocessing.plan import Plan
from megalite.data.preprocessing.pool import EncoderPool
from megalite.data.preprocessing.report import DatasetReport, digests, name_histogram, read_report
from megalite.data.preprocessing.sentences import sentence_splitter
from megalite.data.preprocessing.totals import ColumnTotal, Progress
from megalite.data.storage import require_local
from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer_digest import write_tokenizer_digest
from megalite.errors import UserError
from megalite.log import log

__all__ = ["PreprocessJob", "Progress", "Summary", "num_cores", "preprocess"]

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Summary:
    """What a run has done.

    Attributes:
        progress: at its end.
        reports: one a key.
        was_complete: by an earlier run of the same job, so that there was nothing to go on with.
    """

    progress: Progress
    reports: tuple[DatasetReport, ...]
    was_complete: bool = False


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def preprocess(job: PreprocessJob, on_progress: OnProgress | None = None) -> Summary:
    """Tokenizes all documents; each output appears under its name once it is whole.

    A run that is killed leaves the folder {stem}.unfinished, from which one with `resume` goes on. One that
    fails leaves nothing; if it has gone on from an earlier run, it leaves what is done to be gone on with.

    Args:
        job: what to do.
        on_progress: called after each piece of the input.

    Raises:
        UserError: the tokenizer or an input cannot be read, the output exists or cannot be written, a record
            is bad (unless these are skipped), there is no document at all, or what is to be resumed is
            another job.
    """
    require_local("--output-prefix", job.output_prefix)
    tokenizer = job.build_tokenizer()
    if job.append_eod:
        _ = tokenizer.eod  # a vocabulary without one is told before any work
    if job.sentence_language:
        sentence_splitter(job.sentence_language)
    files = find_inputs(job.inputs)
    identity = job.identity(files, tokenizer)
    done = _finished_before(job, identity)
    if done:
        with Ledger(job.stem):  # which removes what a kill at the very end has left
            return done
    with Ledger(job.stem) as ledger:
        plan = _open(job, ledger, files, identity)
        run = _Run(job, on_progress or (lambda progress: None))
        run.progress.total_input_bytes = plan.total_bytes
        pieces = plan.pieces()
        if job.resume and ledger.header:
            run.skip(ledger.go_on(), pieces)
        else:
            header = {"identity": identity, "stream_compressed": plan.stream_compressed}
            ledger.start(header)
        try:
            run.encode(ledger, pieces)
            reports = run.write(ledger.folder, tokenizer, identity)
        except CannotWrite as error:
            raise UserError(f"{error}; {ledger.fate}") from None
    return Summary(run.progress, tuple(reports))


def _open(job: PreprocessJob, ledger: Ledger, files: list[str], identity: dict[str, Any]) -> Plan:
    """The plan of a new run or, as it was, of the one to go on with; refuses to replace what is there."""
    before = ledger.header
    if before and not job.resume and not job.overwrite:
        raise UserError(f"{ledger.folder} is left of an interrupted run: --resume it, or --overwrite it")
    if before and job.resume:
        for flag, value in identity.items():
            if before["identity"].get(flag) != value:
                was = before["identity"].get(flag)
                detail = (
                    "" if flag in ("--input", "--tokenizer-type") else f": it was {was}, and now is {value}"
                )
                raise UserError(
                    f"the interrupted run in {ledger.folder} had another {flag}{detail}; "
                    "go on with the same one, or --overwrite it without --resume"
                )
        return Plan(job, files, before["stream_compressed"])
    for key in job.json_keys:
        for name in (f"{job.prefix(key)}.bin", f"{job.prefix(key)}.idx"):
            if os.path.exists(name) and not job.overwrite:
                raise UserError(f"{name} exists: give another output prefix, or --overwrite")
    return Plan(job, files, sum(map(is_compressed, files)) < 2 * job.workers)


def _finished_before(job: PreprocessJob, identity: dict[str, Any]) -> Summary | None:
    """What an earlier run of the same job has written in full, for one that is to go on with it."""
    reports = [read_report(job.prefix(key)) for key in job.json_keys if job.resume]
    if not reports or not all(
        report and report.get("made_with") == identity and os.path.exists(f"{report['prefix']}.idx")
        for report in reports
    ):
        return None
    whole = tuple(DatasetReport(**report) for report in reports if report)
    num_tokens = sum(report.num_tokens for report in whole)
    return Summary(Progress(max(report.num_documents for report in whole), num_tokens), whole, True)


class _Run:
    """The sums of one run, from its first piece to its datasets."""

    def __init__(self, job: PreprocessJob, on_progress: OnProgress) -> None:
        self._job = job
        self._on_progress = on_progress
        self._started = time.monotonic()
        self._totals = [ColumnTotal() for _ in job.json_keys]
        self.progress = Progress()

    def skip(self, results: Iterator[PieceResult], pieces: Iterator[Piece]) -> None:
        """Takes over what is done, and passes over its pieces."""
        for result in results:
            piece = next(pieces, None)
            if piece is None or piece.checksum != result.checksum:
                raise UserError("the input is not what it was before the interruption: start anew")
            self._add(piece, result)
        progress = self.progress
        progress.num_resumed_bytes = progress.num_bytes
        progress.num_resumed_input_bytes = progress.num_input_bytes
        progress.num_resumed_tokens = progress.num_tokens
        self._started = time.monotonic()

    def encode(self, ledger: Ledger, pieces: Iterator[Piece]) -> None:
        with EncoderPool(self._job, ledger.folder) as pool:
            for piece, result in pool.encode(pieces):
                ledger.append(result)
                self._add(piece, result)
                self._on_progress(self.progress)

    def _add(self, piece: Piece, result: PieceResult) -> None:
        progress = self.progress
        for source, what, number, why in result.bad[: max(0, MAX_MESSAGES - progress.num_skipped)]:
            log.warning("skipped %s, %s %d: %s", source, what, locate(piece, number), why)
        for total, column in zip(self._totals, result.columns, strict=True):
            total.add(column)
        progress.num_documents = max(total.num_documents for total in self._totals)
        progress.num_tokens = sum(total.num_tokens for total in self._totals)
        progress.num_bytes += result.num_bytes
        progress.num_input_bytes += result.num_input_bytes
        progress.num_skipped += result.num_skipped
        progress.seconds = time.monotonic() - self._started

    def write(self, folder: str, tokenizer: Tokenizer, identity: dict[str, Any]) -> list[DatasetReport]:
        """Joins the shards, and puts all datasets in place, each .idx last."""
        for key, total in zip(self._job.json_keys, self._totals, strict=True):
            if total.num_documents == 0:
                index, count = self._job.partition
                part = f"part {index}/{count} of the input" if count > 1 else "the input"
                hint = " (fewer parts have more each)" if count > 1 else ""
                raise UserError(
                    f"{part} has no document with text under the key {key!r}: nothing is written{hint}"
                )
        try:
            reports = [
                self._write_dataset(Path(folder, str(k)), tokenizer, identity, k)
                for k in range(len(self._totals))
            ]
            for k, report in enumerate(reports):
                _put_in_place(Path(folder, str(k)), report.prefix, tokenizer)
        except OSError as error:
            raise CannotWrite(f"cannot write {self._job.stem}: {error.strerror}") from None
        self.progress.seconds = time.monotonic() - self._started
        return reports

    def _write_dataset(
        self, path: Path, tokenizer: Tokenizer, identity: dict[str, Any], k: int
    ) -> DatasetReport:
        total, dtype = self._totals[k], token_dtype(tokenizer.vocab_size)
        join(str(path.parent), total.extents, dtype, f"{path}.bin", f"{path}.idx")
        unknown = tokenizer.unk
        report = DatasetReport(
            prefix=self._job.prefix(self._job.json_keys[k]),
            num_documents=total.num_documents,
            num_sequences=total.num_sequences,
            num_tokens=total.num_tokens,
            num_text_bytes=total.num_text_bytes,
            bytes_per_token=total.num_text_bytes / total.num_tokens,
            num_skipped=self.progress.num_skipped,
            unknown_share=None if unknown is None else total.num_unknown / total.num_tokens,
            length_histogram=name_histogram(total.histogram),
            dtype=dtype.name,
            sha256=digests({kind: f"{path}.{kind}" for kind in ("bin", "idx")}),
            made_with=identity,
        )
        report.write(f"{path}.report")
        return report


def _put_in_place(path: Path, prefix: str, tokenizer: Tokenizer) -> None:
    if os.path.exists(f"{prefix}.idx"):
        os.remove(f"{prefix}.idx")  # a new .bin must never be read through an old .idx
    write_tokenizer_digest(prefix, tokenizer)
    for kind, name in (("bin", "bin"), ("report", "json"), ("idx", "idx")):
        os.replace(f"{path}.{kind}", f"{prefix}.{name}")
