"""The report in a real browser. Needs Chromium (Debian: `apt install chromium`); skipped where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from moebius.rollout.report_html import page
from tests.unit.reports import step_report

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
# The page in a frame as wide as a screen, since a headless window cannot be as narrow as a phone.
FRAME = """<!doctype html><body style="margin:0"><iframe src="report.html" width="{width}" height="4000"></iframe>
<pre id="found"></pre><script>
document.querySelector("iframe").onload = event => {{
  const frame = event.target, inner = frame.contentDocument, seen = frame.contentWindow.performance;
  const visible = [...inner.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width > 0);
  document.getElementById("found").textContent = JSON.stringify({{
    wide: inner.documentElement.scrollWidth, room: frame.clientWidth,
    requests: seen.getEntriesByType("resource").map(entry => entry.name),
    drawings: visible.length,
    cut: visible.filter(svg => svg.getBoundingClientRect().right > frame.clientWidth + 1).length,
    loaded_ms: seen.getEntriesByType("navigation")[0].loadEventStart,
  }});
}};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen_and_asks_for_nothing(tmp_path: Path, width: int) -> None:
    reports = [step_report(i, lengths=list(range(1, 200)), switch_at=40, iteration_s=0.05, n=1) for i in range(9)]
    (tmp_path / "report.html").write_text(page(reports), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert match is not None and match[1], shown[-2000:]
    found = json.loads(unescape(match[1]))
    print(found)
    assert found["wide"] <= found["room"]
    assert found["requests"] == []
    assert found["drawings"] > 9 and found["cut"] == 0
