"""The user guide's programs run, and print what the guide says."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path

import pytest

import gradsplit

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page):
    """All blocks of Python are one file, ``example.py``, with the blank lines between them that a reader would put."""
    gradsplit.reset()
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    program: list[str] = []
    expected = []
    for position, (language, text) in enumerate(blocks):
        if language == "python":
            program.append(text)
            follows = blocks[position + 1 : position + 2]
            expected.append(follows[0][1] if follows and follows[0][0] == "text" else None)
    source = "\n".join(program)
    linecache.cache["example.py"] = (len(source), None, source.splitlines(keepends=True), "example.py")
    scope: dict[str, object] = {"__name__": "example"}
    start = 0
    for text, output in zip(program, expected, strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * start + text, "example.py", "exec"), scope)
        start += text.count("\n") + 1
        if output is not None:
            assert printed.getvalue().strip() == output.strip()
