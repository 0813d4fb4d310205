"""The report page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from megalite.cli import report
from megalite.config.entry_point import run_main
from megalite.train.tracing import Lane, TraceSpan, write_trace
from tests.run_folder import write_restarted_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PROBE = """<script>
setTimeout(() => {
  const charts = document.getElementById("charts"), found = document.body.dataset;
  const area = charts.querySelector(".nsewdrag"), box = area.getBoundingClientRect();
  const event = { clientX: box.left + box.width * POSITION, clientY: box.top + 50, bubbles: true };
  area.dispatchEvent(new MouseEvent("mousemove", event));
  setTimeout(() => {
    const line = charts.querySelector(".hoverlayer .spikeline").getBoundingClientRect();
    const last = [...charts.querySelectorAll(".nsewdrag")].at(-1).getBoundingClientRect();
    found.tip = [...charts.querySelectorAll(".hoverlayer text")].map((text) => text.textContent).join("; ");
    found.marked = line.top <= box.top + 1 && line.bottom >= last.bottom - 1;
    const lines = [...charts.querySelectorAll("path.js-line")].filter((each) => each.getBBox().width > 300);
    found.drawn = new Set(lines.map((each) => each.closest(".subplot"))).size;
    found.requests = performance.getEntriesByType("resource").length;
    const buttons = [...document.querySelectorAll(".modebar-btn")];
    found.buttons = buttons.map((each) => each.dataset.title).join("; ");
    const log = [...charts.querySelectorAll(".updatemenu-button")].at(-1);
    found.before = charts._fullLayout.yaxis.type;
    log.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    document.getElementById("theme").click();
    found.scheme = document.documentElement.style.colorScheme;
    setTimeout(() => { found.after = charts._fullLayout.yaxis.type; }, 500);
  }, 500);
}, 500);
</script></body>"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = write_restarted_run(tmp_path / "run <1>")
    spans = [TraceSpan("iteration 5", "iteration", 1.0, 2.0), TraceSpan("F0", "forward", 1.0, 1.5, 0, 0)]
    write_trace(folder / "pipeline_trace_5-5.json", [Lane(0, {"pp": 0}, spans)], {"verdict": {"bubble": 0.5}})
    return folder


def _write(*arguments: str | Path) -> Path:
    run_main(report.main, list(map(str, arguments)))
    return Path(arguments[-1])


def _open(page: Path, position: float) -> tuple[dict[str, str], str, str]:
    """Return the probe's results at this share of the x axis, the page as drawn, and its console."""
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", PROBE.replace("POSITION", str(position))))
    return _dump(probe)


def _dump(page: Path) -> tuple[dict[str, str], str, str]:
    """Return the data attributes of a page's body, the page as drawn, and its console."""
    assert CHROMIUM
    done = subprocess.run(
        [
            *(
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--virtual-time-budget=8000",
                "--window-size=1280,2400",
            ),
            *("--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"),
            page.as_uri(),
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
def test_the_page_draws_its_charts_and_shows_the_values_under_the_pointer(run_folder: Path) -> None:
    page = _write(run_folder, "--output", run_folder / "report.html")
    found, document, console = _open(page, 0.3)
    assert console == ""
    num_charts = len(set(re.findall(r'class="subplot (\w+)"', document)))
    assert num_charts >= 5
    assert int(found["drawn"]) >= num_charts - 1  # the evaluations' line is the short one
    assert found["marked"] == "true"
    (iteration, value) = re.match(r"(\d+); training loss : ([\d.]+)", found["tip"]).groups()  # type: ignore[union-attr]
    assert 60 <= int(iteration) <= 66  # the axis runs from 1 to just over 200
    assert 3.0 < float(value) < 3.6
    assert "gradient norm : " in found["tip"]  # all charts together
    assert (found["before"], found["after"]) == ("linear", "log")
    assert found["scheme"] == "dark"
    assert found["requests"] == "0" and "Zoom in" in found["buttons"]
    assert not re.search("cloud|share|upload", found["buttons"], re.IGNORECASE)
    assert document.count('class="trace bars"') >= 2 and "bubble 50%" in document


@needs_chromium
def test_runs_over_each_other(run_folder: Path, tmp_path: Path) -> None:
    other = write_restarted_run(tmp_path / "other")
    page = _write(run_folder, other, "--x", "tokens", "--output", tmp_path / "both.html")
    found, document, console = _open(page, 0.3)
    assert console == ""
    assert "; run &lt;1&gt; : " in found["tip"] and "; other : " in found["tip"]
    assert ">Training loss</tspan>" in document and ">tokens</text>" in document


MEASURE = """<script>
setTimeout(() => {
  const right = (selector) => Math.max(
    ...[...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect().right));
  const page = document.documentElement.scrollWidth;
  const parts = right(".main-svg, .annotation, .updatemenu-container, tr");
  parent.postMessage([innerWidth, { page, parts, line: right("#charts path.js-line") }], "*");
}, 3000);
</script></body>"""


@needs_chromium
def test_no_width_cuts_the_page_off(run_folder: Path) -> None:
    """The page in frames, because a window cannot be as narrow as a phone's."""
    page = _write(run_folder, "--output", run_folder / "report.html")
    page.write_text(page.read_text().replace("</body>", MEASURE))
    widths = (360, 400, 768, 1300)
    frames = "".join(
        f'<iframe src="{page.name}" style="width:{width}px;height:3000px;border:0"></iframe>'
        for width in widths
    )
    store = "onmessage = ({ data }) => { document.body.dataset[`w${data[0]}`] = JSON.stringify(data[1]); };"
    frame = page.with_name("frames.html")
    frame.write_text(f"<script>{store}</script><body>{frames}</body>")
    measured, _, _ = _dump(frame)
    for width in widths:
        found = json.loads(unescape(measured[f"w{width}"]))
        assert max(found["page"], found["parts"]) <= width, (width, found)
        assert 0.85 * width < found["line"] <= width, (width, found)


def test_the_page_needs_nothing_else(run_folder: Path) -> None:
    """Nothing is fetched or uploaded, and no name in a run becomes markup."""
    evil = {"iteration": 100, "split": "valid", "name": "</script><b>", "lm_loss": 2.0}
    with (run_folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"validation": evil, "start_time": 1000.0, "wall_time": 1052.0}) + "\n")
    text = _write(run_folder, "--output", run_folder / "report.html").read_text()
    assert text.count("</script>") == text.count("<script")
    library = get_plotlyjs()
    assert library in text
    text = text.replace(library, "")
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://", text)
    assert text.count('"showSendToCloud": false') == text.count("Plotly.newPlot(") == 2
    assert "<b>\\" not in text and "<1>" not in text
    assert "num_layers: 4 # &lt;b&gt;" in text


def test_an_output_that_cannot_be_written(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_main(report.main, [str(run_folder), "--output", str(run_folder)])
    assert capsys.readouterr().err.startswith(f"error: --output {run_folder} cannot be written (")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--log", "missing.log"), "log missing.log cannot be read (No such file or directory)"),
        (("--output", "{metrics}"), "--output {metrics} is the metrics file of a run: pass another file"),
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


def test_an_axis_that_a_run_has_no_metric_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    with pytest.raises(SystemExit):
        run_main(report.main, [str(metrics), "--x", "tokens"])
    assert "--x tokens: " in capsys.readouterr().err
