"""The report page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from megalite.cli import report
from megalite.train.tracing import Lane, TraceSpan, write_trace
from megalite.utils.commands import run_main
from tests.run_folder import write_restarted_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = write_restarted_run(tmp_path / "run <1>")
    spans = [TraceSpan("iteration 5", "iteration", 1.0, 2.0), TraceSpan("F0", "forward", 1.0, 1.5, 0, 0)]
    write_trace(
        folder / "pipeline_trace_5-5.json", [Lane(0, {"pp": 0}, spans)], {"verdict_line": "bubble 50%"}
    )
    return folder


def _write(*arguments: str | Path) -> Path:
    run_main(report.main, list(map(str, arguments)))
    return Path(arguments[-1])


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
                "--virtual-time-budget=2000",
                "--window-size=1280,2400",
            ),
            *("--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    body = re.search("<body[^>]*>", done.stdout)
    assert body, done.stderr
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body[0])), done.stdout, console


MEASURE = """<script>
setTimeout(() => {
  const right = (selector) => Math.max(
    ...[...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect().right));
  const page = document.documentElement.scrollWidth;
  parent.postMessage([innerWidth, { page, parts: right("table") }], "*");
}, 300);
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


def test_the_page_needs_nothing_else(run_folder: Path) -> None:
    """Nothing is fetched or uploaded, and no name in a run becomes markup."""
    evil = {"iteration": 100, "split": "valid", "name": "</script><b>", "lm_loss": 2.0}
    with (run_folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"validation": evil, "start_time": 1000.0, "wall_time": 1052.0}) + "\n")
    text = _write(run_folder, "--output", run_folder / "report.html").read_text()
    assert not re.search(r"<script|(?:src|href)=|url\(|@import|https?://", text)
    assert "<1>" not in text and "valid &lt;/script&gt;&lt;b&gt; 2.0000" in text
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
