"""Filter, deduplicate, shuffle and tokenize raw text into a corpus in shards.

megalite prepare --config corpus.yaml
megalite prepare --config corpus.yaml --pass sign --task 3/64

docs/data.md has the settings of the file. If a run is killed, the same command continues it. The corpus does
not depend on the number of processes and tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megalite.cli.preprocess import partition
from megalite.data.prepare.plan import PASSES, CorpusJob, CorpusPlan, make_plan, read_corpus_job
from megalite.data.prepare.prepare import (
    check_earlier,
    check_jobs,
    find_report,
    finish,
    log_folder,
    run_pass,
    start,
    submit,
)
from megalite.data.preprocessing.preprocess import num_cores
from megalite.frontends.tool_parser import ToolParser, positive_int
from megalite.observe.report.page import corpus_page
from megalite.utils.errors import ConfigError, UserError, counted
from megalite.utils.files import write_output
from megalite.utils.log import ProgressLine, log
from megalite.utils.object_store import ObjectFolder


def build_parser() -> ToolParser:
    """Build the parser."""
    parser = ToolParser(description=__doc__)
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="settings of the corpus, in YAML")
    add(
        "--workers",
        type=positive_int,
        metavar="N",
        help="number of processes; it does not change the output (workers of the file, or one per core)",
    )
    add(
        "--pass",
        dest="name",
        choices=PASSES,
        metavar="PASS",
        help=f"run one pass, for array jobs: {', '.join(PASSES)}, in this order (all)",
    )
    add(
        "--task",
        type=partition,
        metavar="I/N",
        help="with --pass: run only part I of N of the pass, I from 0; N may differ between passes",
    )
    add("--overwrite", action="store_true", help="replace output of other settings or input")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    flags, problems = build_parser().find_problems(arguments)
    if flags.task and not flags.name:
        problems.append("--task needs --pass: a task is a part of one pass")
    if flags.task and flags.name == "finish" and flags.task[1] > 1:
        problems.append("--pass finish is one task: remove --task")
    if problems:
        raise ConfigError(problems)
    job = read_corpus_job(flags.config)
    executor, workers = "local" if flags.name else job.run.executor, flags.workers or job.run.workers
    if executor != "local" and workers is None:
        raise UserError(
            f"executor {executor} needs the number of workers: set run: workers, or pass --workers"
        )
    plan, prefix = make_plan(job), job.output
    if executor == "slurm":
        check_jobs(plan)
    report = start(plan, flags.overwrite)
    if report is not None:
        _write_page(job, report)
        print(f"{prefix}.shards.json: complete already")
        return
    workers = workers or num_cores()
    if executor == "slurm":
        print("\n".join(_submitted(plan, flags.config, flags.overwrite, workers)))
        return
    try:
        with ProgressLine(seconds_between_lines=10.0) as line:
            for name in [flags.name] if flags.name else PASSES:
                check_earlier(plan, name)
                if name == "finish":
                    report = finish(plan)
                else:
                    part, show = flags.task or (0, 1), partial(_show, line)
                    run_pass(plan, name, part, workers, show, on_ray=executor == "ray")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: run the same command to continue\n")
        raise SystemExit(130) from None
    except UserError:
        report = find_report(plan)  # another process may have finished, and removed the files of the passes
        if report is None:
            raise
    if report is None:
        part = " {}/{}".format(*flags.task) if flags.task else ""
        print(f"pass {flags.name}{part} is done")
        return
    _write_page(job, report)
    print("\n".join(_summary(prefix, report)))
    if (special := report["special_tokens_in_text"])["documents"] and job.special_tokens_in_text == "keep":
        log.warning(
            "%s: the texts of %s name special tokens, and each name becomes the token (first %s): "
            "set special_tokens_in_text to escape or drop unless this is intended",
            *(prefix, counted(special["documents"], "document"), special["examples"][0]["from"]),
        )


def _submitted(plan: CorpusPlan, config: str, overwrite: bool, workers: int) -> list[str]:
    arguments = ["--config", config, *(["--overwrite"] if overwrite else [])]
    jobs = submit(plan, arguments, workers)
    numbers = ",".join(jobs.values())
    return [
        f"submitted to Slurm: {', '.join(f'{name} {job}' for name, job in jobs.items())}",
        f"  logs: {log_folder(plan)}; state: squeue -j {numbers}; end them: scancel {numbers}",
        "  if a job fails, the passes after it are cancelled: run the same command again to continue",
    ]


def _show(line: ProgressLine, name: str, done: int, count: int) -> None:
    line(f"pass {PASSES.index(name) + 1} of {len(PASSES)}, {name}: {done:,} of {count:,} tasks")


def _write_page(job: CorpusJob, report: dict[str, Any]) -> None:
    page = corpus_page(job.output, report)
    if job.output_url is None:
        write_output(Path(f"{job.output}.report.html"), page, "output")
    else:
        ObjectFolder(job.output_url).write(f"{job.output_name}.report.html", page.encode())


def _summary(prefix: str, report: dict[str, Any]) -> list[str]:
    width = max(14, *(len(step["step"]) + 2 for step in report["steps"]), 0)
    rows = [f"  {'read':{width}}{report['documents']:>14,} documents {report['bytes']:>18,} bytes"]
    rows += [
        f"  {step['step']:{width}}{step['documents_out']:>14,} documents {step['bytes_out']:>18,} bytes"
        for step in report["steps"]
    ]
    output = report["output"]
    skipped = [f"{counted(report['bad'], 'bad document')} skipped"] if report["bad"] else []
    skipped += [f"{counted(output['empty'], 'document')} without tokens skipped"] if output["empty"] else []
    return [
        f"wrote {prefix}.shards.json: {output['documents']:,} documents, {output['tokens']:,} tokens in "
        f"{counted(len(output['shards']), 'shard')}{''.join(f', {text}' for text in skipped)}",
        *rows,
        f"  report: {prefix}.report.html and .json; sources of the documents: {prefix}.sources",
    ]
