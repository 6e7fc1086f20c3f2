"""A program that differs made smaller: statements and results are dropped while it still differs in the same way."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator

_SIMPLER = (
    ("CALLS = 2", "CALLS = 1"),
    ("BACKWARD = 'twice'", "BACKWARD = 'weights'"),
    ("CHOSEN = 'odd'", "CHOSEN = 'all'"),
    ("CHOSEN = 'first'", "CHOSEN = 'all'"),
    ("CHOSEN = 'last'", "CHOSEN = 'all'"),
)


def reduce_program(source: str, differs: Callable[[str], bool], seconds: float = 60.0) -> str:
    """The smallest text found in the time for which ``differs`` holds."""
    end = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in _smaller(source):
            if time.monotonic() > end:
                break
            if smaller != source and differs(smaller):
                source, changed = smaller, True
                break
    return source


def _smaller(source: str) -> Iterator[str]:
    """Texts with one thing less: the later statements first, since the earlier ones are more often needed."""
    count = len(list(_bodies(ast.parse(source))))
    for which in range(count):
        length = len(list(_bodies(ast.parse(source)))[which][1])
        for index in reversed(range(length)):
            for way in ("drop", "inline"):
                tree = ast.parse(source)
                owner, body = list(_bodies(tree))[which]
                statement = body[index]
                if way == "inline":
                    if not isinstance(statement, (ast.If, ast.With, ast.For, ast.Try)):
                        continue
                    body[index : index + 1] = statement.body
                elif (
                    isinstance(statement, (ast.Return, ast.Import))
                    or getattr(statement, "name", "")
                    in (
                        "state",
                        "program",
                    )
                    or (isinstance(statement, ast.Assign) and isinstance(owner, ast.Module))
                ):
                    continue
                else:
                    del body[index]
                if not body:
                    body.append(ast.Pass())
                yield ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    yield from _fewer_parts(source)


def _bodies(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """The lists of statements, those of ``program`` first."""
    owners = [node for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    owners.sort(key=lambda node: getattr(node, "name", "") in ("state", "forward", "backward"))
    for owner in owners:
        for name in ("body", "orelse", "finalbody"):
            body = getattr(owner, name, None)
            if isinstance(body, list) and body:
                yield owner, body


def _fewer_parts(source: str) -> Iterator[str]:
    """Texts that return less, or take fewer arguments."""
    returns = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Return)]
    for which, node in enumerate(returns):
        if not isinstance(node.value, (ast.Tuple, ast.List)):
            continue
        for index in range(len(node.value.elts)):
            tree = ast.parse(source)
            again = [n for n in ast.walk(tree) if isinstance(n, ast.Return)][which]
            assert isinstance(again.value, (ast.Tuple, ast.List))
            del again.value.elts[index]
            if len(again.value.elts) == 1 and isinstance(again.value, ast.Tuple):
                if which and isinstance(again.value.elts[0], ast.List):
                    continue
                again.value = again.value.elts[0]
            yield ast.unparse(tree) + "\n"
    for more, fewer in _SIMPLER:
        if more in source:
            yield source.replace(more, fewer)
