"""A torch that lacks one of the private parts: the import works, and a plain model compiles or runs as plain Python."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import gradsplit.distributed  # noqa: F401 -- looks up the parts of process groups, too
from gradsplit.compile_core.torch_facts.private_parts import PRIVATE_PARTS
from gradsplit.support import private_parts_table, versions_table

ROOT = Path(__file__).parent.parent.parent

private_parts_table()
# One of those that serve the same purpose with the same consequence; make private-parts misses each.
PARTS = sorted({(part.purpose, part.without): name for name, part in sorted(PRIVATE_PARTS.items())}.values())
# The names are shared out, so that workers walk the table side by side.
SHARES = 2


@pytest.mark.multi_process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", range(SHARES))
def test_without_each_part(share):
    command = [sys.executable, "-m", "tests.torch_facts.without_each_part", *PARTS[share::SHARES]]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert not run.returncode and not run.stdout, run.stdout


def test_the_table_says_what_goes_without_each():
    text = io.StringIO()
    console = Console(file=text, width=300)
    console.print(versions_table())
    console.print(private_parts_table())
    shown = text.getvalue()
    assert all(name in shown for name in PRIVATE_PARTS)
    assert all(part.purpose and part.without for part in PRIVATE_PARTS.values())
