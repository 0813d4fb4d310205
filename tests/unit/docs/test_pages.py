"""Check the documentation against the code: links, commands and their output, pictures, tables, names."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.make.__main__ import main, with_tables
from docs.make.blocks import Example, agrees, examples_of, renewed, run
from docs.make.pictures import PICTURES, SHARED, bytes_a_parameter
from megalite.plan.estimate import RunPlan
from megalite.plan.plan_request import read_request
from tests.test_architecture import LEVEL_OF

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = [example for page in PAGES for example in examples_of(page)]
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
CODE_REFERENCE = re.compile(r"\[[^]]*\]\((\.\./[^)\s]+\.py)\)[^`\n]*((?:[:|] *|, | and )`[^\n]*)")
RENEW = "run python -m docs.make, and read what it changes"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_a_cell_of_the_readmes_table_has_few_links() -> None:
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 10
    assert [row for row in rows if max(len(LINK.findall(cell)) for cell in row.split("|")) > 5] == []


def test_every_page_is_in_the_index() -> None:
    listed = set(LINK.findall((DOCS / "README.md").read_text(encoding="utf-8")))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/")} - {"README.md"} <= listed


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == DOCS], ids=name_of)
def test_named_objects_are_in_the_linked_files(page: Path) -> None:
    for path, names in CODE_REFERENCE.findall(page.read_text(encoding="utf-8")):
        code = (page.parent / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names.split("|")[-1] if "|" in names else names.split(". ")[0]):
            for part in name.split("."):
                assert re.search(rf"\b{part}\b", code), f"{path} has no {name}"


def test_functions_named_in_contributing_exist() -> None:
    """Check the functions named in CONTRIBUTING and in the linter settings, which may have been renamed."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")  # its examples define names too
    code = "\n".join(
        [guide, *(path.read_text(encoding="utf-8") for path in (ROOT / "megalite").rglob("*.py"))]
    )
    spans = re.findall(r"`([^`\n]+)`", guide)
    named = {name for span in spans for name in re.findall(r"\b([A-Za-z_]+)\(", span)} - {"launch", "p"}
    assert {"option", "new_parameter"} <= named
    assert [name for name in sorted(named) if not re.search(rf"(def |class |import .*){name}\b", code)] == []
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for module in re.findall(r"\"(megalite\.[a-z_.]+)\.[a-z_]+\"", settings):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


PATH = r"`([\w.]+/[\w./]*)`"
DEFINED_IN = re.compile(rf"`([A-Za-z_]\w*)`(?:,\s+\w+\s+|\s+in\s+|\s+\(){PATH}")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/tour.md"])
def test_named_paths_exist(name: str) -> None:
    paths = re.findall(PATH, (ROOT / name).read_text(encoding="utf-8"))
    assert paths
    placeholders = {"csrc/cuda/NAME.cu"}
    assert [path for path in paths if path not in placeholders and not (ROOT / path).exists()] == []


def test_names_in_contributing_are_defined_in_the_named_files() -> None:
    pairs = DEFINED_IN.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(pairs) > 6
    for name, path in pairs:
        code = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b\s*[:=]", code, re.MULTILINE), (name, path)


def test_the_tour_has_a_name_at_each_stop() -> None:
    stops = CODE_REFERENCE.findall((DOCS / "tour.md").read_text(encoding="utf-8"))
    assert len(stops) >= 30


def glossary() -> dict[str, str]:
    """Return the meaning of each term of the glossary."""
    text = (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    return {term: meaning for terms, meaning in rows if terms != "term" for term in terms.split(", ")}


def test_the_glossary_names_what_the_code_has() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "megalite").rglob("*.py"))
    for name in re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", " ".join(glossary().values())):
        owner, _, member = name.partition(".")
        assert re.search(rf"^(?:class|def) {owner}\b", code, re.MULTILINE), name
        assert not member or f"    def {member}(self" in code, name


def test_the_tests_that_judge_quantities_exist() -> None:
    named = re.findall(
        r"`((?:unit|ranks|parity|end_to_end)/\S+\.py)`", (DOCS / "reference" / "judges.md").read_text()
    )
    assert len(named) > 20 and [name for name in named if not (ROOT / "tests" / name).exists()] == []


def test_the_tour_counts_the_concepts_of_the_training_step() -> None:
    section = (DOCS / "tour.md").read_text(encoding="utf-8").partition("## Concepts to know before")[2]
    items = " ".join(section.split("\n## ")[0].split()).partition(" 1. ")[2].partition(" These are ")
    concepts = re.sub(r"\.(?: \d\. |$)", ",", items[0])
    names = [each.split(":")[-1].strip() for each in concepts.split(",") if each.strip()]
    assert items[2].startswith(f"{len(names)} concepts")
    qualified = {"mesh of the experts": "mesh", "parameter spec with its cuts": "parameter spec"}
    assert [name for name in names if qualified.get(name, name) not in glossary()] == []


def test_the_tour_lists_the_levels_that_imports_follow() -> None:
    tree = (DOCS / "tour.md").read_text(encoding="utf-8").partition("megalite/            level")[2]
    listed = {
        name.removesuffix(".py").removesuffix("/").replace("/", "."): int(level)
        for names, level in re.findall(r"^ {6}((?:[\w./]+ )+) *(\d+) ", tree, re.MULTILINE)
        for name in names.split()
    }
    assert listed == LEVEL_OF


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_commands_print_what_the_page_shows(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    printed = run(example)
    assert agrees(example.output, printed), f"{RENEW}\n{printed}"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_up_to_date(name: str) -> None:
    text = (DOCS / "pictures" / name).read_text(encoding="utf-8")
    assert text == PICTURES[name](), RENEW
    assert len(text) < 50_000
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_the_readmes_picture_can_be_read_on_a_phone() -> None:
    """A screen of 360 pixels has about 330 for a picture, which is scaled down to them."""
    shown = re.findall(r"pictures/(.*?\.svg)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown
    for name in shown:
        picture = ElementTree.fromstring(PICTURES[name]())
        sizes = [float(text.attrib["font-size"]) for text in picture.iterfind("{*}text")]
        assert min(sizes) * min(1.0, 330 / float(picture.attrib["width"])) >= 9, name


def test_every_picture_is_shown() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == set(PICTURES)
    assert [name for name in PICTURES if f"pictures/{name})" not in shown] == []


@pytest.mark.parametrize("name", ["flags.md", "deepspeed_settings.md"])
def test_a_generated_table_is_up_to_date(name: str) -> None:
    text = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert text.count("made by python -m docs.make -->") == 1
    assert with_tables(text) == text, RENEW


@pytest.mark.parametrize("stage", SHARED)
def test_bytes_of_a_zero_stage_match_the_planner(stage: int) -> None:
    """Compare the arithmetic of the picture with the planner, which other tests compare with real tensors."""
    request = read_request(
        ["--preset", "llama3-8b", "--gpu", "h100", "--world-size", "8", "--bf16", "--zero-stage", str(stage)]
    )
    plan = RunPlan(request.planned_run())
    memory = plan.memories[0]
    planned = [memory.weights, memory.gradients, memory.optimizer]
    expected = [plan.parameters * size for size in bytes_a_parameter(stage, 8)]
    assert planned == pytest.approx(expected, rel=0.01)


def test_an_output_may_omit_lines() -> None:
    printed = "one\ntwo  \nthree\nfour\n"
    assert agrees("one\n…\nfour\n", printed)
    assert agrees("…\nthree\nfour\n", printed)
    assert agrees("one\n…\n", printed)
    assert not agrees("one\nfour\n", printed)
    assert not agrees("…\nfive\n…\n", printed)


def test_output_is_renewed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = "python tools/show_schedule.py --schedule 1f1b \\\n    --stages 2 --microbatches 3"
    page.write_text(f"# A page\n\n```console\n$ {command}\nold\n$ {command}\n…\nrank 0 old\n…\n```\n\nEnd.\n")
    text = renewed(page)
    page.write_text(text)
    assert text.startswith("# A page\n\n```console\n$ python") and text.endswith("|\n…\n```\n\nEnd.\n")
    assert "old" not in text and text.count("rank 0 |F0F1....B0==") == 2
    assert renewed(page) == text


def test_one_page_is_renewed_with_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs.make.__main__.DOCS", tmp_path / "docs")
    monkeypatch.setattr("docs.make.__main__.PICTURES", {"a.svg": lambda: "a", "b.svg": lambda: "b"})
    (tmp_path / "docs").mkdir()
    for name in ("one", "two"):
        command = "python tools/show_schedule.py --schedule 1f1b --stages 2 --microbatches 3"
        (tmp_path / "docs" / f"{name}.md").write_text(
            f"![A](pictures/a.svg)\n\n```console\n$ {command}\nold\n```\n"
        )
    main([str(tmp_path / "docs" / "one.md")])
    assert "rank 0 |F0F1" in (tmp_path / "docs" / "one.md").read_text()
    assert "\nold\n" in (tmp_path / "docs" / "two.md").read_text()
    assert [file.name for file in (tmp_path / "docs" / "pictures").iterdir()] == ["a.svg"]


def test_bloom_summary_matches_its_plans() -> None:
    """Compare the summary table with the figures of the plans above it."""
    page = DOCS / "bloom.md"
    rows = re.findall(
        r"^\| [ABC] \| ([\d.]+) \| [\d.]+ \| [^|]+ \| ([\d.]+) \|", page.read_text(), re.MULTILINE
    )
    assert len(rows) == 3
    for example, (gigabytes, seconds) in zip(examples_of(page), rows, strict=False):
        total = re.search(r"^every .* ([\d.]+)$", example.output, re.MULTILINE)
        iteration = re.search(r"^iteration +([\d.]+) s", example.output, re.MULTILINE)
        assert total is not None and iteration is not None
        assert float(total.group(1)) == pytest.approx(float(gigabytes), abs=0.051)
        assert float(iteration.group(1)) == pytest.approx(float(seconds), abs=0.0051)


def test_zero_stages_of_the_table_match_the_planner() -> None:
    text = (DOCS / "zero.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    python tools/plan.py (--gpu .*?) --zero-stage 1 <", text, re.M | re.DOTALL)
    rows = re.findall(r"^\| [\d.]+B \| `([^`]+)` ((?:\| [\d.]+ ){4})\| (\w+) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for flags, shown, recommended in rows:
        words = [*command.replace("\\\n", " ").split(), *flags.split(), "--zero-stage"]
        plans = [RunPlan(read_request([*words, str(stage)]).planned_run()) for stage in range(4)]
        planned = [f"{plan.memory_bytes / 1e9:.1f}" for plan in plans]
        assert shown.strip("| ").split(" | ") == planned, flags
        fitting = [str(stage) for stage in (1, 2, 3) if plans[stage].fits]
        assert recommended == next(iter(fitting), "none"), flags
