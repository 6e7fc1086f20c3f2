"""Headless Chromium, where there is one: what a page looks like."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ARTIFACTS = Path(__file__).parents[2] / "out" / "screenshots"
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_OUTER = '<body style="margin:0"><iframe src="{}" style="border:0;width:100vw;height:100vh"></iframe></body>'


def _run(page: Path, anchor: str, *options: str) -> str:
    """What the browser prints of a page.

    The page is in a frame of another: pictures are of what a page begins with, wherever it is scrolled to.

    Raises:
        AssertionError: a script of the page fails, or something that it loads is not there.
    """
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no headless Chromium on PATH")
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder, "outer.html")
        outer.write_text(_OUTER.format(f"{page.absolute().as_uri()}#{anchor}"))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [
            "--enable-logging=stderr",
            f"--user-data-dir={folder}/profile",
            "--virtual-time-budget=5000",
        ]
        run = subprocess.run(
            [*command, *options, outer.as_uri()], capture_output=True, text=True, timeout=100, check=True
        )
    said = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return run.stdout


def take_screenshot(page: Path, name: str, anchor: str = "", width: int = 1500, height: int = 1000) -> Path:
    """A picture of a page in the tests' artifacts, scrolled to an anchor as a link does."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    picture = ARTIFACTS / f"{name}.png"
    picture.unlink(missing_ok=True)
    _run(page, anchor, f"--screenshot={picture}", f"--window-size={width},{height}")
    return picture
