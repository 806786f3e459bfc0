"""The page in a real browser: no console message, every plot drawn. Needs Chromium (.ci/run installs Debian's)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nosa_sys.report.inputs import load_inputs
from nosa_sys.report.page import build_page
from nosa_sys.report.results_page.page import build_results_page
from tests.report.report_inputs import write_everything

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium here (looked for {', '.join(BROWSERS)}): the page is not opened in a browser")
    return found


def open_page(browser: str, page: Path, profile: Path) -> tuple[str, list[str]]:
    """(document after scripts ran, console messages)."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [
        "--no-first-run",
        "--disable-extensions",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={profile}",
    ]
    command += ["--window-size=1200,9000", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_every_plot_is_drawn_without_a_console_message(browser: str, tmp_path: Path) -> None:
    page = build_page(load_inputs([write_everything(tmp_path / "in", hole=True)]), title="test")
    file = tmp_path / "report.html"
    file.write_text(page.html, encoding="utf-8")
    dom, console = open_page(browser, file, tmp_path / "profile")
    assert not console
    body = dom.split("</head>")[1]
    for key in page.figures:
        start = body.index(f'id="{key}"')
        section = body[start : body.index("</section>", start)]
        assert 'class="main-svg"' in section, f"{key} is not drawn"
        marks = len(re.findall(r'class="(trace |point|js-line|hm)', section)) + section.count("<image")
        assert marks > 0, f"{key} has no trace"


def test_every_plot_of_the_results_page_is_drawn(browser: str, tmp_path: Path) -> None:
    page = build_results_page(Path(__file__).parents[2] / "experiments" / "results")
    file = tmp_path / "results.html"
    file.write_text(page.html, encoding="utf-8")
    dom, console = open_page(browser, file, tmp_path / "profile")
    assert not console
    body = dom.split("</head>")[1]
    for section in page.sections:
        for index in range(len(section.plots)):
            start = body.index(f'id="{section.key}-{index}"')
            drawn = body[start : body.index("</section>", start)]
            assert 'class="main-svg"' in drawn, f"{section.key} is not drawn"
            assert re.search(r'class="(trace |point|js-line|hm)', drawn), f"{section.key} has no trace"


def test_console_messages_are_seen(browser: str, tmp_path: Path) -> None:
    """The test above can fail: a page that throws is caught."""
    file = tmp_path / "bad.html"
    file.write_text("<html><head></head><body><script>throw new Error('boom')</script></body></html>")
    _, console = open_page(browser, file, tmp_path / "profile")
    assert any("boom" in line for line in console)
