"""Write the report of a prepared corpus as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from megalite.observe.report.page import html_page, html_table
from megalite.observe.report.time_report import Table


def corpus_page(prefix: str, report: dict[str, Any]) -> str:
    """Return the page.

    Args:
        prefix: prefix of the corpus.
        report: contents of PREFIX.report.json.
    """
    tables = [_flow(report), *_examples(report)]
    tables += [
        Table(title, heads, tuple((name, f"{count:,}") for name, count in report[key].items()))
        for key, title, heads in (
            ("languages", "Languages", ("language", "documents")),
            ("contaminated_items", "Evaluation items found in documents", ("item", "documents removed")),
        )
    ]
    groups = tuple(
        (f"{each['documents']:,}", each["step"], each["first"], each["text"])
        for each in report["duplicate_groups"]
    )
    tables.append(Table("Largest groups of duplicates", ("documents", "step", "first", "text"), groups))
    parts = (f"<h2>{escape(table.title)}</h2>{html_table(table)}" for table in tables if table.rows)
    return html_page(f"Corpus {prefix}", parts)


def _flow(report: dict[str, Any]) -> Table:
    output, special = report["output"], report["special_tokens_in_text"]
    rows = [("read", f"{report['documents']:,}", "", f"{report['bytes']:,}", "")]
    rows += [
        (
            step["step"],
            f"{step['documents_out']:,}",
            f"{step['documents_in'] - step['documents_out']:,}",
            f"{step['bytes_out']:,}",
            "",
        )
        for step in report["steps"]
    ]
    rows.append(
        ("output", f"{output['documents']:,}", "", f"{output['bytes']:,}", f"{output['tokens']:,}"),
    )
    rows += [
        (name, f"{count:,}", "", "", "")
        for name, count in (
            ("bad, skipped", report["bad"]),
            ("without tokens, skipped", output["empty"]),
            ("with names of special tokens", special["documents"]),
        )
        if count
    ]
    return Table("Steps", ("step", "documents left", "removed", "bytes left", "tokens"), tuple(rows))


def _examples(report: dict[str, Any]) -> Iterator[Table]:
    special = report["special_tokens_in_text"]["examples"]
    named = [(f"Removed by {step['step']}", step["examples"]) for step in report["steps"]]
    for title, examples in (*named, ("Bad", report["bad_examples"]), ("Names of special tokens", special)):
        rows = tuple((each["from"], each["reason"], each["text"]) for each in examples)
        yield Table(title, ("from", "reason", "text"), rows)
