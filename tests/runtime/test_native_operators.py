"""Operators that a region calls as functions of C give what Python's give, and raise it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram, View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.runtime.link_program import link_program
from gradsplit.compile_core.runtime.native_operators import native_call

aten = torch.ops.aten


def view_of(name: str, tensor: torch.Tensor) -> View:
    return View(name, tuple(tensor.shape), tuple(tensor.stride()))


def run(
    call: ExternCall, tensors: dict[str, torch.Tensor], results: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Runs a program of one call, which is made in C where regions are."""
    # Before torch 2.13 a list that may be missing, the sizes of a bias for its gradient, was freed before it was read.
    takes_lists = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
    wants_bias = call.target is aten.convolution_backward.default and call.arguments[-1][2]
    is_native = takes_lists or not wants_bias
    assert (native_call(call, "cpu") is not None) == is_native
    specs = {name: TensorSpec.of(tensor) for name, tensor in {**tensors, **results}.items()}
    outputs = tuple(view_of(name, tensor) for name, tensor in results.items())
    program = LoopProgram("test", tuple(tensors), (), specs, {}, (call,), outputs)
    found = link_program(program, [], {})([*tensors.values()])
    return [*found]


def check(call: ExternCall, tensors: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for found, expected in zip(run(call, tensors, results), results.values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            assert found.stride() == expected.stride()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("factors", [{}, {"beta": 0.5}, {"alpha": -2}, {"beta": 0, "alpha": 3.5}])
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_products(region_form: str, name: str, factors: dict[str, Any]):
    if "add" not in name:
        factors = {}
    batch = (2,) if "bmm" in name else ()
    tensors = {"x": draw(*batch, 3, 4), "y": draw(*batch, 4, 5)}
    if "add" in name:
        tensors = {"bias": draw(5), **tensors}
    expected = getattr(torch, name)(*tensors.values(), **factors)
    arguments = tuple(view_of(key, tensor) for key, tensor in tensors.items())
    call = ExternCall(getattr(aten, name).out, arguments, factors, (), {"out": view_of("r", expected)})
    check(call, tensors, {"r": expected})


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions(region_form: str, with_bias: bool, transposed: bool):
    x, weight, bias = draw(2, 4, 9, 9), draw(4, 2, 3, 3), draw(4) if with_bias else None
    x = x.contiguous(memory_format=torch.channels_last)
    rest = ([2, 1], [1, 0], [1, 2], transposed, [1, 0] if transposed else [0, 0], 2)
    expected = torch.convolution(x, weight, bias, *rest)
    tensors = {"x": x, "w": weight} | ({} if bias is None else {"b": bias})
    named = {
        "x": view_of("x", x),
        "w": view_of("w", weight),
        "b": None if bias is None else view_of("b", bias),
    }
    call = ExternCall(aten.convolution.default, (*named.values(), *rest), {}, ("r",))
    check(call, tensors, {"r": expected})


@pytest.mark.parametrize("images", [0, 2])
@pytest.mark.parametrize("mask", [[True, True, False], [False, True, True], [True, False, False]])
def test_gradients_of_convolutions(region_form: str, mask: list[bool], images: int):
    x, weight = draw(images, 4, 9, 9), draw(6, 4, 3, 3)
    rest = ([6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    gradient = draw(images, 6, 9, 9)
    found = aten.convolution_backward.default(gradient, x, weight, *rest)
    tensors = {"g": gradient, "x": x, "w": weight}
    names = tuple(f"r{k}" if kept else None for k, kept in enumerate(mask))
    expected = {name: tensor for name, tensor in zip(names, found, strict=True) if name is not None}
    arguments = tuple(view_of(name, tensor) for name, tensor in tensors.items())
    check(ExternCall(aten.convolution_backward.default, (*arguments, *rest), {}, names), tensors, expected)


def test_a_product_that_does_not_fit(region_form: str):
    tensors = {"x": draw(3, 4), "y": draw(5, 6)}
    views = tuple(view_of(name, tensor) for name, tensor in tensors.items())
    result = torch.empty(3, 6)
    call = ExternCall(aten.mm.out, views, {}, (), {"out": view_of("r", result)})
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run(call, tensors, {"r": result})


def test_an_operator_with_other_arguments_than_its_function_has(monkeypatch: pytest.MonkeyPatch):
    views = [View(name, (2, 2), (2, 1)) for name in "xyr"]
    call = ExternCall(aten.mm.out, tuple(views[:2]), {}, (), {"out": views[2]})
    assert native_call(call, "cpu") is not None and native_call(call, "no_such_device") is None
    functions = {aten.mm.out: ("mm_out", "out self mat2 precision")}
    monkeypatch.setattr("gradsplit.compile_core.runtime.native_operators._FUNCTIONS", functions)
    assert native_call(call, "cpu") is None
