"""Pictures of regions: written where they are asked for, one box a step, edges along the data."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import gradsplit
from gradsplit.compile_core.observe.diagram import Box, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_rows_follow_what_a_step_needs() -> None:
    boxes = [
        Box("a", "first", "kernel", ()),
        Box("b", "x < y", "call", (0,)),
        Box("c", "third", "kernel", (0,)),
    ]
    root = ElementTree.fromstring(draw("picture", boxes))
    assert [title.text for title in root.iter(f"{SVG}title")] == ["first", "x < y", "third"]
    heights = [int(group[1].attrib["y"]) for group in root.iter(f"{SVG}g")]
    assert heights[0] < heights[1] == heights[2]
    assert len(list(root.iter(f"{SVG}path"))) == 2


@pytest.mark.parametrize(("backend", "picture"), [("triton", "fused"), ("aot_eager", "graph")])
def test_compiled_regions_are_drawn(tmp_path: Path, backend: str, picture: str) -> None:
    options = {"trace_folder": tmp_path, "trace.graph_diagram": True}
    x = torch.randn(4, 4, requires_grad=True)
    gradsplit.compile(lambda x: (x @ x).sin().sum(), backend=backend, options=options)(x).backward()
    drawn = {path.name.split(".", 1)[1]: path for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {f"forward.{picture}.svg", f"backward.{picture}.svg"}
    labels = [
        text.text or "" for text in ElementTree.parse(drawn[f"forward.{picture}.svg"]).iter(f"{SVG}text")
    ]
    assert any("mm" in label for label in labels)


def test_what_was_not_fused_is_written_with_the_reason(tmp_path: Path) -> None:
    x = torch.randn(8, 6)
    gradsplit.compile(lambda x: (x.sum(0), x.sum(1)), options={"trace_folder": tmp_path})(x)
    (written,) = tmp_path.glob("*.unfused.txt")
    assert "they reduce over different axes (192 bytes)" in written.read_text()
