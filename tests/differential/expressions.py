"""The templates of ``expressions.txt``, which says what their holes are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def _templates(line: str) -> Iterator[str]:
    """What blanks separate that do not lie within strings or brackets."""
    depth, quoted, current = 0, False, ""
    for letter in line:
        quoted ^= letter == '"'
        depth += (letter in "([") - (letter in ")]")
        if letter != " " or depth or quoted:
            current += letter
        elif current:
            yield current
            current = ""
    if current:
        yield current


def read_tables() -> dict[str, list[str]]:
    """Templates by the name of their kind."""
    tables: dict[str, list[str]] = {}
    name = ""
    for line in Path(__file__).with_name("expressions.txt").read_text().splitlines():
        if line.startswith("== "):
            name = line[3:]
        elif not line.startswith("#"):
            tables.setdefault(name, []).extend(_templates(line))
    return tables
