"""The report's page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megalite.cli import run_main
from megalite.train.tracing.chrome import Lane, write_trace
from megalite.train.tracing.spans import Span
from tests.run_folder import write_restarted_run
from tools import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PROBE = """<script>
const svg = document.querySelector("svg.chart"), box = svg.getBoundingClientRect();
const x = box.left + box.width * PLACE, y = box.top + 50;
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
document.body.dataset.tip = tip.textContent;
document.body.dataset.marks = document.querySelectorAll(".cursor path").length;
const lines = [...document.querySelectorAll("svg.linear path.line")];
document.body.dataset.drawn = lines.filter((line) => line.getBBox().width > 300).length;
const log = document.querySelector("svg.log"), shown = () => getComputedStyle(log).display;
document.body.dataset.before = shown();
log.closest("figure").querySelector(".switch").click();
document.body.dataset.after = shown();
document.getElementById("theme").click();
document.body.dataset.scheme = document.documentElement.style.colorScheme;
</script></body>"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = write_restarted_run(tmp_path / "run <1>")
    spans = [Span("iteration 5", "iteration", 1.0, 2.0), Span("F0", "forward", 1.0, 1.5, 0, 0)]
    write_trace(folder / "pipeline_trace_5-5.json", [Lane(0, (0, 0, 0), spans)], {"verdict": {"bubble": 0.5}})
    return folder


def _write(*arguments: str | Path) -> Path:
    run_main(report.main, list(map(str, arguments)))
    return Path(arguments[-1])


def _open(page: Path, place: float) -> tuple[dict[str, str], str, str]:
    """What the probe found at this share of the first chart's width, the page as it stands, its console."""
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", PROBE.replace("PLACE", str(place))))
    assert CHROMIUM
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"),
            *("--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"),
            probe.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    body = re.search("<body[^>]*>", done.stdout)
    assert body, done.stderr
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body[0])), done.stdout, console


@needs_chromium
def test_the_page_draws_its_charts_and_tells_what_is_under_the_pointer(run_folder: Path) -> None:
    page = _write(run_folder, "--output", run_folder / "report.html")
    found, document, console = _open(page, 0.5)
    assert console == ""
    num_charts = document.count('class="chart linear"')
    assert num_charts >= 5
    assert int(found["drawn"]) >= num_charts - 1  # the evaluations' line is the short one
    assert found["marks"] == str(document.count('class="chart l'))
    # 0.5 of 600 pixels lies 246 into the 528 of the axis, which is from 1 to 200.
    (place, value) = re.match(r"training loss at (\d+): ([\d.]+)", found["tip"]).groups()  # type: ignore[union-attr]
    assert 93 <= int(place) <= 95
    assert 2.0 < float(value) < 3.0
    assert (found["before"], found["after"]) == ("none", "block")
    assert found["scheme"] == "dark"
    assert 'class="lost' in document and 'class="strange"' in document
    assert "<title>F0: 500.000 ms</title>" in document and "bubble 50%" in document


@needs_chromium
def test_runs_over_each_other(run_folder: Path, tmp_path: Path) -> None:
    other = write_restarted_run(tmp_path / "other")
    page = _write(run_folder, other, "--x", "tokens", "--output", tmp_path / "both.html")
    found, document, console = _open(page, 0.3)
    assert console == ""
    assert found["tip"].startswith("run &lt;1&gt; at ") and "other at " in found["tip"]
    assert 'aria-label="Training loss"' in document and ">tokens</text>" in document


def test_the_page_needs_nothing_else(run_folder: Path) -> None:
    """Nothing is fetched, and nothing that a run is called becomes markup."""
    evil = {"iteration": 100, "split": "valid", "name": "</script><b>", "lm_loss": 2.0}
    with (run_folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"validation": evil, "start_time": 1000.0, "wall_time": 1052.0}) + "\n")
    text = _write(run_folder, "--output", run_folder / "report.html").read_text()
    assert text.count("</script>") == text.count("<script")
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://", text)
    assert "run <1>" not in text.replace('"run <1>', "")
    assert "num_layers: 4 # &lt;b&gt;" in text


def test_a_place_that_cannot_be_written(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_main(report.main, [str(run_folder), "--output", str(run_folder)])
    assert capsys.readouterr().err.startswith(f"error: --output {run_folder} cannot be written (")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--log", "missing.log"), "log missing.log cannot be read (No such file or directory)"),
        (("--output", "{metrics}"), "--output {metrics} is the run's own metrics file: give another file"),
    ],
)
def test_mistakes(
    run_folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str], expected: str
) -> None:
    metrics = run_folder / "metrics.jsonl"
    before = metrics.read_text()
    with pytest.raises(SystemExit):
        run_main(report.main, [str(run_folder), words[0], words[1].format(metrics=metrics)])
    assert capsys.readouterr().err == f"error: {expected.format(metrics=metrics)}\n"
    assert metrics.read_text() == before


def test_an_axis_that_a_run_does_not_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    with pytest.raises(SystemExit):
        run_main(report.main, [str(metrics), "--x", "tokens"])
    assert "--x tokens: " in capsys.readouterr().err
