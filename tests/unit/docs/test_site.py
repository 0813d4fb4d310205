"""The site of the documentation: its menu, links between its pages, and the check of its links."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megalite
from docs.make.check_site import broken_links, main
from docs.make.site import ROOT, on_config, public_names, reference_pages, source_page, with_site_links


class _Config:
    nav: Any = None


def _pages(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for entry in menu.values() if isinstance(menu, dict) else menu:
            yield from _pages(entry)


def test_the_menu_has_every_page_once() -> None:
    config = _Config()
    on_config(config)
    listed = list(_pages(config.nav))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs - {"README.md"} <= set(listed)
    assert set(reference_pages()) <= set(listed)
    assert len(listed) == len(set(listed))
    assert listed[:3] == ["index.md", "quickstart.md", "gpus.md"]


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/zero.md", "parallel.md#recomputation", "parallel.md#recomputation"),
        ("docs/tour.md", "../megalite/model/layer.py", "source/megalite/model/layer.py.md"),
        ("docs/tour.md", "../CONTRIBUTING.md#commits", "CONTRIBUTING.md#commits"),
        ("docs/launch.md", "../scripts/azureml_job.yaml", "scripts/azureml_job.yaml"),
        ("docs/decisions/cli.md", "../../benchmarks/RESULTS.md", "../benchmarks/RESULTS.md"),
        ("benchmarks/RESULTS.md", "../docs/performance.md", "../performance.md"),
        ("README.md", "docs/README.md", "pages.md"),
        ("CONTRIBUTING.md", "README.md", "index.md"),
        ("README.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page: str, link: str, expected: str) -> None:
    assert with_site_links(f"See [this]({link}), too.", ROOT / page) == f"See [this]({expected}), too."


def test_the_reference_has_the_public_names_alone() -> None:
    names = [each for group in public_names().values() for each in group]
    assert sorted(each.name for each in names) == sorted(megalite.__all__)
    first, *others = reference_pages().values()
    for name, _, path in names:
        assert f"`{name}`" in first
        if path is None:
            assert name == "__version__"
            continue
        assert any(f"::: {path}\n" in page for page in others)
        module, _, defined = path.rpartition(".")
        assert getattr(importlib.import_module(module), defined) is getattr(megalite, name)
    assert "__getattr__" not in "".join((first, *others))


def test_a_page_of_code_shows_the_file() -> None:
    path = "examples/own_loss.py"
    assert (ROOT / path).read_text(encoding="utf-8") in source_page(path)


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("README.md", "[docs/install.md](docs/install.md)", "[Install](install.md)"),
        ("docs/zero.md", "[data_parallel.md](data_parallel.md)", "[Data parallelism](data_parallel.md)"),
        ("docs/guides.md", "[observe.md](observe.md#the-report)", "[The report](observe.md#the-report)"),
        ("docs/zero.md", "[a guide](data_parallel.md)", "[a guide](data_parallel.md)"),
    ],
)
def test_a_link_shows_the_title_of_its_page_instead_of_a_file_name(
    page: str, link: str, expected: str
) -> None:
    assert with_site_links(link, ROOT / page) == expected


def test_the_list_of_pages_counts_on_in_each_group() -> None:
    markdown = pytest.importorskip("markdown")
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    extensions = [line.removeprefix("  - ").split()[0] for line in lines if line.startswith("  - sane")]
    html = markdown.markdown((ROOT / "docs" / "README.md").read_text(), extensions=extensions)
    starts = [int(start or 1) for start in re.findall(r'<ol(?: start="(\d+)")?>', html)]
    assert starts[:2] == [1, 7] and starts == sorted(starts)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_worker_runs_on_a_page_from_disk(tmp_path: Path) -> None:
    (tmp_path / "worker.js").write_text('addEventListener("message", ({ data }) => postMessage(data + 1));')
    script = "const worker = new Worker('worker.js'); worker.postMessage(41);"
    show = "worker.addEventListener('message', ({ data }) => { document.body.dataset.answer = data; });"
    shim = (ROOT / "docs" / "iframe-worker.js").read_text()
    page = tmp_path / "page.html"
    page.write_text(f"<head><script>{shim}</script></head><body><script>{script}{show}</script></body>")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    shown = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert 'data-answer="42"' in shown.stdout


def _site(folder: Path, link: str) -> list[str]:
    (folder / "part").mkdir()
    (folder / "index.html").write_text(f'<h1 id="top">A</h1><a href="{link}">B</a>')
    (folder / "part" / "page.html").write_text('<p id="here">C</p><img src="../picture.svg">')
    (folder / "picture.svg").write_text("<svg/>")
    return list(broken_links(folder))


@pytest.mark.parametrize(
    "link", ["part/page.html#here", "#top", "https://example.org", "part/page.html", "picture.svg"]
)
def test_links_that_lead_somewhere_pass(
    tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _site(tmp_path, link) == []
    main([str(tmp_path)])
    assert capsys.readouterr().out == "2 pages, no broken link\n"


@pytest.mark.parametrize("link", ["page.html", "part/page.html#there", "#here", "part", "picture.png"])
def test_a_link_to_nothing_is_named(tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _site(tmp_path, link) == [f"index.html: {link}"]
    with pytest.raises(SystemExit, match="1"):
        main([str(tmp_path)])
    assert f"broken link in index.html: {link}" in capsys.readouterr().out


def test_a_page_that_loads_a_file_from_another_host_is_named(tmp_path: Path) -> None:
    url = "https://example.org/a.js"
    (tmp_path / "index.html").write_text(f'<script src="{url}"></script><a href="https://example.org">B</a>')
    assert list(broken_links(tmp_path)) == [f"index.html: loads {url}"]


def test_the_site_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1"):
        main([str(tmp_path)])


def test_ruff_formats_the_signatures_as_it_formats_the_code() -> None:
    pins = [
        re.findall(r"ruff==[\d.]+", (ROOT / name).read_text())
        for name in ("docs/requirements.txt", "pyproject.toml")
    ]
    assert pins[0] == pins[1] and len(pins[0]) == 1
