"""Add to the site what is not a page of docs/: its menu, the reference of the public names, linked files.

MkDocs calls the functions `on_...` (mkdocs.yml). Links between files of the repository, which GitHub shows as
well, become links between pages of the site.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RENAMED = {"README.md": "index.md", "docs/README.md": "pages.md"}
"""Files whose pages have other names; docs/README.md is the list of pages that GitHub shows."""
PROJECT = ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/RESULTS.md")
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
        if path.endswith(".py"):
            text = source_page(path)
            files.append(File.generated(config, site_path(path), content=text))
        else:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))

    for page, text in reference_pages().items():
        files.append(File.generated(config, page, content=text))
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
    if source is None:  # of the reference, or of code
        return markdown
    return _TABLE_ROW.sub(_without_escapes, with_site_links(markdown, Path(source)))


class PublicName(NamedTuple):
    """A name that ``import megalite`` gives.

    Attributes:
        summary: what it is.
        path: where it is defined, ``megalite.module.name``; None if no module defines it.
    """

    name: str
    summary: str
    path: str | None


def public_names() -> Mapping[str, Sequence[PublicName]]:
    """Return the public names by group, as docs/python_api.md lists them."""
    page = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8").split("\n## Public names\n")[1]
    stub = ast.parse((ROOT / "megalite" / "__init__.pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return {
        group: [
            PublicName(name, summary, _definition(modules[name], name) if name in modules else None)
            for name, summary in re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
        ]
        for group, table in re.findall(r"^### (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE)
    }


def _definition(module: str, name: str) -> str:
    """Return where a name of a module is defined, through imports and assignments of another name."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(node.module, alias.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and _assigns(node, name):
            return _definition(module, node.value.id)
    return f"{module}.{name}"


def _assigns(node: ast.Assign, name: str) -> bool:
    return [ast.unparse(target) for target in node.targets] == [name]


def reference_pages() -> Mapping[str, str]:
    """Return the pages of the reference: all names, and one for each group with their documentation."""
    lines = [
        "# Public names",
        "",
        "All that `import megalite` gives. Other modules may change between versions.",
    ]
    pages = {}
    for group, names in public_names().items():
        page = _group_page(group)
        lines += ["", f"## {group}", "", "| name | what it is |", "|---|---|"]
        parts = [f"# {group}"]
        for name, summary, path in names:
            code = f"`{name}`"
            lines.append(f"| {code if path is None else f'[{code}]({page}#{path})'} | {summary} |")
            if path is not None:
                options = f"      show_root_heading: true\n      heading: {name}\n      toc_label: {name}"
                parts.append(f"::: {path}\n    options:\n{options}")
        pages[f"reference/{page}"] = "\n\n".join(parts) + "\n"
    return {"reference/index.md": "\n".join(lines) + "\n", **pages}


def _group_page(group: str) -> str:
    return f"{group.lower().replace(' ', '_')}.md"


def source_page(path: str) -> str:
    """Return a page that shows a file of code; the search does not find it."""
    text = (ROOT / path).read_text(encoding="utf-8")
    options = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"
    return f"{options}# `{path}`\n\n`````python\n{text}`````\n"


def site_path(path: str) -> str:
    """Return where the site has a file of the repository, as MkDocs names its source."""
    if path.endswith(".py"):
        return f"source/{path}.md"
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
    yield {"Reference": list(reference_pages())}
