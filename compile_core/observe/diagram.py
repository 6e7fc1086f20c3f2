"""Pictures of regions: the kernels and calls that a region became, and which waits for which.

A box is a step of the region, below all steps whose results it reads or overwrites; what lies in one row is
independent. Pointing at a box shows what the step does. The picture is an SVG file, which browsers show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import torch

from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.print_loops import print_step
from gradsplit.compile_core.ir.step_effects import reads, writes

_WIDTH, _HEIGHT, _GAP, _ROW_GAP, _MARGIN = 230, 34, 16, 34, 24
_LETTERS = 34
_FILL = {"kernel": "#d7ecd9", "call": "#d9e4f5"}


@dataclass(frozen=True)
class Box:
    """A step: what the box says, what pointing at it shows, and the positions of the earlier steps that it needs."""

    label: str
    details: str
    kind: str
    needs: tuple[int, ...]


def draw_program(program: LoopProgram) -> str:
    """A picture of a fused program; generated kernels and calls of torch's kernels have different colours."""
    boxes = []
    touched_by: dict[str, list[int]] = {}
    for position, step in enumerate(program.steps):
        written, touched = writes(step), reads(step) | writes(step)
        writers = {
            other
            for name in touched
            for other in touched_by.get(name, ())
            if name in written or name in writes(program.steps[other])
        }
        is_kernel = not isinstance(step, ExternCall)
        label = str(step.target) if isinstance(step, ExternCall) else step.name
        boxes.append(Box(label, print_step(step), "kernel" if is_kernel else "call", tuple(sorted(writers))))
        for name in touched:
            touched_by.setdefault(name, []).append(position)
    return draw(program.name, boxes)


def draw_graph(name: str, module: torch.fx.GraphModule) -> str:
    """A picture of a graph whose operators all run one by one."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    positions = {node: position for position, node in enumerate(nodes)}
    return draw(
        name,
        [
            Box(
                node.name,
                str(node.format_node()),
                "call",
                tuple(sorted(positions[source] for source in node.all_input_nodes if source in positions)),
            )
            for node in nodes
        ],
    )


def draw(title: str, boxes: Sequence[Box]) -> str:
    """The SVG text."""
    rows: list[list[int]] = []
    row_of: list[int] = []
    for position, box in enumerate(boxes):
        row = max((row_of[other] + 1 for other in box.needs), default=0)
        row_of.append(row)
        while len(rows) <= row:
            rows.append([])
        rows[row].append(position)
    places: dict[int, tuple[int, int]] = {}
    for row, members in enumerate(rows):
        for column, position in enumerate(members):
            x = _MARGIN + column * (_WIDTH + _GAP)
            places[position] = x, 2 * _MARGIN + row * (_HEIGHT + _ROW_GAP)
    width = 2 * _MARGIN + max(map(len, rows), default=1) * (_WIDTH + _GAP)
    height = 3 * _MARGIN + len(rows) * (_HEIGHT + _ROW_GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN}" font-size="14">{escape(title)}</text>',
    ]
    lines += [
        _edge(places[other], places[position]) for position, box in enumerate(boxes) for other in box.needs
    ]
    lines += [_box(box, places[position]) for position, box in enumerate(boxes)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x0, y0 = start[0] + _WIDTH // 2, start[1] + _HEIGHT
    x1, y1 = end[0] + _WIDTH // 2, end[1]
    bend = _ROW_GAP
    return f'<path d="M{x0} {y0} C{x0} {y0 + bend} {x1} {y1 - bend} {x1} {y1}" fill="none" stroke="#999"/>'


def _box(box: Box, place: tuple[int, int]) -> str:
    x, y = place
    label = box.label if len(box.label) <= _LETTERS else box.label[: _LETTERS - 1] + "…"
    return (
        f"<g><title>{escape(box.details)}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{_FILL[box.kind]}" stroke="#666"/>'
        f'<text x="{x + 8}" y="{y + 21}" font-size="11">{escape(label)}</text></g>'
    )
