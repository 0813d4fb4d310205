"""Add to the site what is not a page of docs/: its menu, the reference of the code, files that pages link to.

MkDocs calls the functions `on_...` (mkdocs.yml). Links between files of the repository, which GitHub shows as
well, become links between pages of the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[2]
RENAMED = {"README.md": "index.md", "docs/README.md": "pages.md"}
"""Files whose pages have other names; docs/README.md is the list of pages that GitHub shows."""
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/RESULTS.md")
"""Other pages that are not in docs/."""
_CODE = re.compile(r"`[^`\n]+`")
_TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<target>[^)#\s]+)(?P<rest>(?:#(?P<anchor>[^)\s]*))?\))")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def on_config(config: Any) -> None:
    """Set the menu: the groups of docs/README.md, and the pages that are not in it."""
    config.nav = [{"Home": "index.md"}, *_groups(), *_other_groups()]


def on_files(files: Any, config: Any) -> None:
    """Add pages and other files to those of docs/."""
    from mkdocs.structure.files import File

    def add(path: str) -> None:
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))

    for module, path in modules().items():
        text = f"# `{module}`\n\n::: {module}\n"
        files.append(File.generated(config, reference_page(path), content=text))
    pages = [*RENAMED, *PROJECT]
    for path in pages:
        add(path)
    for page in [*(ROOT / path for path in pages), *(ROOT / "docs").rglob("*.md")]:
        for target in _targets(page):
            if site_path(target) not in files.src_uris:
                add(target)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site, and write code in tables as Python-Markdown reads it."""
    source = page.file.abs_src_path
    if source is None:  # of the reference
        return markdown
    return _TABLE_ROW.sub(_without_escapes, with_site_links(markdown, Path(source)))


def modules() -> Mapping[str, str]:
    """Return the modules of the package, as names and paths in the repository."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "megalite").rglob("*.py"))
    named = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in found}
    return {name: path for name, path in named.items() if not name.endswith(".__main__")}


def reference_page(path: str) -> str:
    """Return the page of the site that describes a module."""
    return f"reference/{path.removesuffix('.py')}.md".replace("__init__.md", "index.md")


def site_path(path: str) -> str:
    """Return where the site has a file of the repository, as MkDocs names its source."""
    if path.startswith("megalite/") and path.endswith(".py"):
        return reference_page(path)
    return RENAMED.get(path) or path.removeprefix("docs/")


def with_site_links(markdown: str, source: Path) -> str:
    """Return a page with its links to files of the repository as links of the site.

    A link whose text is the name of a page, which GitHub's readers know, gets that page's title or section.
    """
    here = PurePosixPath(site_path(source.relative_to(ROOT).as_posix())).parent

    def link(found: re.Match[str]) -> str:
        target = _repository_path(found["target"], source)
        if target is None:
            return found[0]
        text = found["text"]
        if target.endswith(".md") and PurePosixPath(text).name == PurePosixPath(target).name:
            text = _heading(ROOT / target, found["anchor"]) or text
        return f"[{text}]({os.path.relpath(site_path(target), here)}{found['rest']}"

    return _LINK.sub(link, markdown)


def _heading(page: Path, anchor: str | None) -> str | None:
    """Return the title of a page, or the heading of the section with this anchor; None without one."""
    headings: list[str] = _HEADING.findall(page.read_text(encoding="utf-8"))
    return next((each for each in headings if anchor in (None, "", _anchor(each))), None)


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and Python-Markdown name it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _without_escapes(row: re.Match[str]) -> str:
    r"""Return a row of a table with `|` for `\|` in its code, where GitHub needs the backslash."""
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def _repository_path(target: str, page: Path) -> str | None:
    """Return the path in the repository of a link's target; None for a URL."""
    if "://" in target or target.startswith("mailto:"):
        return None
    path = (page.parent / target).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_file() else None


def _targets(page: Path) -> Iterator[str]:
    for found in _LINK.finditer(page.read_text(encoding="utf-8")):
        if (target := _repository_path(found["target"], page)) is not None:
            yield target


def _groups() -> Iterator[dict[str, list[str]]]:
    """Yield the groups of docs/README.md with their pages."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for name, lines in re.findall(r"^\*\*(.+)\*\*\n\n((?:\d.*\n)+)", index, re.MULTILINE):
        yield {name: re.findall(r"^\d+\. \[.*?\]\((.+?)\)", lines, re.MULTILINE)}


def _other_groups() -> Iterator[dict[str, Any]]:
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))  # README.md first
    yield {
        "Project": [
            "pages.md",
            *PROJECT,
            {"Design decisions": [f"decisions/{name}" for name in decisions]},
        ]
    }
    yield {"Reference": _reference(modules())}


def _reference(paths: Mapping[str, str]) -> list[Any]:
    """Return the menu of the reference: a section for each package."""
    menu: list[Any] = []
    sections: dict[str, list[Any]] = {"": menu}
    for module, path in paths.items():
        parent, _, name = module.rpartition(".")
        if path.endswith("__init__.py"):
            sections[module] = [reference_page(path)]
            sections[parent].append({name: sections[module]})
        else:
            sections[parent].append({name: reference_page(path)})
    return menu
