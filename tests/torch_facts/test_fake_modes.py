"""Descriptions of arguments tell apart what torch's own do, so that no operator gets what another gave."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, _CacheKeyState
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import gradsplit
from gradsplit.compile_core.torch_facts.fake_modes import QuickFakeMode

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def calls(mode: FakeTensorMode) -> list[Call]:
    """Calls that differ in one thing each, some of them made twice."""
    with mode:

        def plain() -> torch.Tensor:
            return torch.empty(4, 6)

        leaf = plain().requires_grad_()
        with torch.inference_mode():
            inferred = plain()
        tensors = [
            *(plain(), plain(), plain().double(), torch.empty(6, 4), torch.empty(24), torch.empty(6, 4).t()),
            *(
                torch.empty(8, 6)[:4],
                torch.empty(8, 6)[4:],
                torch.empty(8, 6)[::2],
                leaf,
                leaf.detach(),
                inferred,
            ),
            *(torch.empty(4, 6, device="meta"), torch.empty(4, 6, dtype=torch.complex64)),
            *(
                torch.empty(4, 6, dtype=torch.complex64).conj(),
                torch.empty(4, 6, dtype=torch.complex64).conj().imag,
            ),
        ]
        x = tensors[0]
    found: list[Call] = [(aten.sin.default, (tensor,), {}) for tensor in tensors]
    found += [(aten.cos.default, (x,), {}), (aten.neg.default, (x,), {}), (aten.sum.default, (x,), {})]
    found += [(aten.add.Tensor, (x, other), {}) for other in (1, 1.0, True, 2, x, tensors[2], None, "a", 1j)]
    found += [(aten.add.Tensor, (x, 1), {"alpha": value}) for value in (1, 1.0, 2, True)]
    found += [(aten.add.Tensor, (x, 1), {"beta": 1}), (aten.add.Tensor, (x,), {"other": 1})]
    found += [
        (aten.sum.dim_IntList, (x, dims), {}) for dims in ([0], [1], (0,), [0, 1], [], [[0], 1], [0, [1]])
    ]
    found += [
        (aten.cat.default, ([x, x],), {}),
        (aten.cat.default, ([x], x), {}),
        (aten.cat.default, (x, x), {}),
    ]
    found += [(aten.sum.default, (x,), {"dtype": dtype}) for dtype in (torch.float64, torch.int64, None)]
    found += [
        (aten.clone.default, (x,), {"memory_format": way})
        for way in (torch.channels_last, torch.contiguous_format)
    ]
    return found


def keys(mode: FakeTensorMode, call: Call, make: Callable[..., Any]) -> Any:
    return make(mode, _CacheKeyState(mode.shape_env), *call)


def test_equal_descriptions_are_equal_to_torch() -> None:
    mode = QuickFakeMode()
    pairs = [
        (keys(mode, call, QuickFakeMode._cache_key), keys(mode, call, FakeTensorMode._cache_key))
        for call in calls(mode)
    ]
    assert all(ours.key[0] is QuickFakeMode for ours, _ in pairs)
    for one, other in itertools.combinations(pairs, 2):
        assert (one[0] == other[0]) == (one[1] == other[1]), (one, other)
    assert pairs[0][0] == pairs[1][0] and hash(pairs[0][0]) == hash(pairs[1][0])


@contextlib.contextmanager
def default_dtype() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("inside", [default_dtype, torch.inference_mode])
def test_modes_are_part_of_the_description(inside: Callable[[], Any]) -> None:
    mode = QuickFakeMode()
    call = calls(mode)[0]
    before = keys(mode, call, QuickFakeMode._cache_key)
    with inside():
        assert keys(mode, call, QuickFakeMode._cache_key) != before
    assert keys(mode, call, QuickFakeMode._cache_key) == before


def test_the_rest_is_described_by_torch() -> None:
    mode = QuickFakeMode(shape_env=ShapeEnv())
    sized = mode.from_tensor(torch.empty(4, 6), static_shapes=False)
    with mode:
        plain = torch.empty(3)
    for call in (
        (aten.sin.default, (sized,), {}),
        (aten.add.Tensor, (plain, sized.shape[0]), {}),
        (aten.sum.dim_IntList, (plain, torch.Size([0])), {}),
    ):
        assert keys(mode, call, QuickFakeMode._cache_key) == keys(mode, call, FakeTensorMode._cache_key)
    with QuickFakeMode(), pytest.raises(Exception, match="not our fake"):
        keys(QuickFakeMode(), (aten.sin.default, (plain,), {}), QuickFakeMode._cache_key)
    with mode, pytest.raises(Exception, match="constant"):
        keys(mode, (aten.sin.default, (torch.tensor(1.5),), {}), QuickFakeMode._cache_key)


def test_what_was_remembered_is_what_operators_give() -> None:
    mode = QuickFakeMode()
    mode.cache_crosscheck_enabled = True
    before = FakeTensorMode.cache_info().hits
    for _ in range(2):
        with mode:
            x = torch.empty(4, 6, requires_grad=True)
            y = (x.t() @ x).softmax(-1)[1:].to(torch.bfloat16).sum(0, keepdim=True)
            assert y.shape == (1, 6) and y.dtype == torch.bfloat16 and y.requires_grad
            views = x.detach().view(2, 12)[:, ::2]
            assert views.stride() == (12, 2) and views._base is not None
    assert FakeTensorMode.cache_info().hits > before


def test_a_view_by_strides_shares_memory_the_second_time_too() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.flatten()

    for _ in range(2):  # the second finds what the operators gave the first
        x = torch.randn(1, 4).expand(0, 4)
        flat = gradsplit.compile(program, backend="aot_eager")(x)
        assert flat._is_view() and flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        flat.mul_(torch.full((), 2.0, requires_grad=True))
        assert x.requires_grad
