"""Lines that reports and generated kernels show are the program's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

import gradsplit
from gradsplit.compile_core.ir.user_lines import user_line, user_lines


def test_lines_are_the_programs_own_where_it_calls_torchs_modules() -> None:
    linear = torch.nn.Linear(2, 2)

    def program(x: torch.Tensor) -> torch.Tensor:
        return linear(x).relu()

    (module,) = captured(program)
    (place,) = user_lines(node for node in module.graph.nodes if node.op.startswith("call"))
    assert (place.filename, place.function, place.text) == (__file__, "program", "return linear(x).relu()")


def test_torchs_line_where_there_is_no_other() -> None:
    (module,) = captured(torch.nn.Linear(2, 2))
    (node,) = [node for node in module.graph.nodes if node.op.startswith("call")]
    place = user_line(node)
    assert place is not None and place.filename.endswith("linear.py")


def captured(program: Any) -> list[GraphModule]:
    seen: list[GraphModule] = []

    def note(module: GraphModule, examples: Any) -> Any:
        seen.append(module)
        return module.forward

    gradsplit.compile(program, backend=note)(torch.ones(1, 2))
    return seen
