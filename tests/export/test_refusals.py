"""What cannot be exported is refused with the user's line, and what cannot be loaded with one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsplit
from gradsplit.compile_core.export import folder
from gradsplit.compile_core.export.conditions import compile_condition
from gradsplit.compile_core.export.parse_program import UnreadableProgram, parse_program

LEAF = torch.ones(3, requires_grad=True)


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def raises(x: Tensor) -> Tensor:
    return x @ torch.ones(7)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (branches, r"(?s)branches cannot be exported.*test_refusals.py.*x\.sum\(\) > 0.*Hint: "),
        (raises, "raises an exception"),
        (lambda x: None, "computes nothing"),
        (lambda x: x * LEAF, "LEAF.* takes gradients and is no parameter"),
        (lambda x: Double.apply(x), r"(?s)autograd_function.*cannot be written.*test_refusals.py"),
        (lambda x: (x * 2, object), "the result has a"),
        (Counting(), r"changes calls, which an exported graph cannot do"),
    ],
)
def test_what_is_not_one_graph(program: Callable[..., Any], message: str) -> None:
    with pytest.raises(gradsplit.Unsupported, match=message):
        gradsplit.export(program, (torch.ones(3),))


def test_left_out_changes_and_wrong_arguments(caplog: pytest.LogCaptureFixture) -> None:
    counting = Counting()
    module = gradsplit.export(counting, (torch.ones(3),), strict=False).module()
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0)) and counting.calls == 0
    assert "calls" in caplog.text
    with pytest.raises(TypeError, match="args is a tuple"):
        gradsplit.export(counting, torch.ones(3))
    with pytest.raises(TypeError, match="not int"):
        gradsplit.export(3)
    with pytest.raises(TypeError, match="args of an export has a set"):
        gradsplit.export(counting, ({1},))


def saved(place: Path) -> Path:
    gradsplit.export(nn.Linear(3, 2), (torch.ones(4, 3),)).save(place)
    return place


def change_manifest(place: Path, **changes: Any) -> None:
    manifest = json.loads((place / folder.MANIFEST).read_text())
    (place / folder.MANIFEST).write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / "export.json").unlink(), "no export.json"),
        (lambda place: (place / "export.json").write_text("{"), "damaged"),
        (lambda place: (place / "export.json").write_text("[]"), "holds no gradsplit export"),
        (lambda place: change_manifest(place, version=99), "version 99 of the format"),
        (lambda place: change_manifest(place, kind="stage"), "holds no gradsplit export"),
        (lambda place: change_manifest(place, data={}), "no export that this gradsplit can load"),
        (lambda place: (place / "graph.txt").unlink(), "lacks graph.txt"),
        (lambda place: (place / "graph.txt").write_text("result()"), "graph.txt is damaged"),
        (lambda place: (place / "tensors.safetensors").write_bytes(b"123"), "tensors.safetensors is damaged"),
    ],
)
def test_damaged_folders(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    place = saved(tmp_path / "saved")
    damage(place)
    with pytest.raises(gradsplit.ExportError, match=message):
        gradsplit.load_export(place)


def test_folders_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileExistsError):
        saved(saved(tmp_path / "one"))

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(folder, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path / "two")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    "line",
    [
        'y: "" = torch.load("x")',
        'y: "" = torch.serialization.os.system("x")',
        'y: "" = torch.from_file("x", True, 3)',
        'y: "" = torch.ops.load_library("x")',
        'y: "" = operator.attrgetter("x")',
        'y: "" = x.__class__()',
        'y: "" = x.apply_(x)',
        'y: "" = x.add(__import__("os"))',
        'y: "" = open("x")',
        "import os",
        'x: "" = torch.add(x, 1)',
        "result(y)",
        "",
    ],
)
def test_texts_call_nothing_but_functions_of_tensors(line: str) -> None:
    with pytest.raises(UnreadableProgram):
        parse_program(f'x: "float32[2]" = argument(0)\n{line}\n')


@pytest.mark.parametrize(
    "text", ["open('x')", "args.__class__", "(lambda: 1)()", "math.floor.__self__", "1 +"]
)
def test_conditions_are_about_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a condition"):
        compile_condition(text)
