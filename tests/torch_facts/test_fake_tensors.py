"""Fake tensors as the modes of this project show them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import gradsplit
from gradsplit.compile_core.autograd.tracing.record_operators import record
from gradsplit.compile_core.torch_facts.fake_tensors import run_on_fakes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The operators that fake tensors are asked for."""
    seen: list[object] = []
    dispatch = FakeTensorMode.dispatch

    def noting(self: FakeTensorMode, func: object, *rest: object, **more: object) -> object:
        seen.append(func)
        return dispatch(self, func, *rest, **more)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noting)
    return seen


def test_a_device_is_known_without_an_operator(asked: list[object]) -> None:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(2, 3, device="cuda:1")
    with run_on_fakes(mode):
        assert x.device == (x @ x.t()).device == torch.device("cuda", 1)
    with mode:
        traced = record(lambda _, given: [(given @ given.t()).to(given.device)], [x], [], {}, mode)
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 1
    assert torch.ops.aten.mm.default in asked and torch.ops.prim.device.default not in asked


@pytest.mark.parametrize("shape", [(0, 2), (3, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_of_nothing_is_its_input(shape: tuple[int, ...], training: bool) -> None:
    mode, plain = FakeTensorMode(), torch.ones(shape)
    is_same = torch.nn.functional.dropout(plain, 0.5, training) is plain
    with mode:
        x = torch.empty(shape)
    with run_on_fakes(mode):
        assert (torch.nn.functional.dropout(x, 0.5, training) is x) == is_same


@pytest.mark.parametrize("settings", [{}, {"return_inverse": True}, {"dim": 0}])
def test_counts_of_no_values_are_integers(settings: dict[str, int]) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.unique(x, return_counts=True, **settings)

    x = torch.ones(0, 4)
    found, plain = gradsplit.compile(program)(x), program(x)
    assert [(part.dtype, part.shape) for part in found] == [(part.dtype, part.shape) for part in plain]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-2, (0, 1), None])
def test_a_norm_over_one_element_leaves_its_dim(dim: int | tuple[int, ...] | None, keepdim: bool) -> None:
    x = torch.zeros(1, 3)
    mode = FakeTensorMode()
    for norm in (torch.norm, torch.linalg.vector_norm):
        with mode, run_on_fakes(mode):
            found = norm(mode.from_tensor(x), 2, dim, keepdim)
        assert found.shape == norm(x, 2, dim, keepdim).shape


@st.composite
def _zeros(draw: st.DrawFn) -> torch.Tensor:
    """Whose dims lie in any order, many of them of size 1."""
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    tensor = torch.zeros([sizes[d] for d in order]).permute([order.index(d) for d in range(len(sizes))])
    return tensor.unsqueeze(0) if draw(st.booleans()) else tensor


@pytest.mark.parametrize(
    ("count", "function"),
    [
        (2, torch.mul),
        (3, torch.addcmul),
        *((2, partial(function, alpha=2)) for function in (torch.add, torch.sub, torch.rsub)),
    ],
)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_elementwise_results_lie_as_those_of_kernels(
    count: int, function: Callable[..., torch.Tensor], data: st.DataObject
) -> None:
    tensors = [data.draw(_zeros()) for _ in range(count)]
    try:
        expected = function(*tensors)
    except RuntimeError:
        return  # their sizes do not go together
    mode = FakeTensorMode()
    with mode, run_on_fakes(mode):
        found = function(*map(mode.from_tensor, tensors))
    moving = [d for d, size in enumerate(expected.shape) if size > 1]
    assert [found.stride(d) for d in moving] == [expected.stride(d) for d in moving]


def test_a_multiple_that_is_added_lies_as_the_kernel_lays_it_where_both_are_repeated() -> None:
    given = torch.empty_strided((4, 2), (1, 4)), torch.empty_strided((4, 1, 2), (1, 2, 4))
    mode = FakeTensorMode()
    for function in (torch.add, torch.sub, torch.rsub):
        with mode, run_on_fakes(mode):
            found = function(*map(mode.from_tensor, given), alpha=2)
        assert found.stride() == function(*given, alpha=2).stride()


def test_results_of_two_tensors_lie_as_those_of_kernels_under_one_row() -> None:
    tensors = torch.empty_strided((1, 1, 2), (1, 1, 1)), torch.empty_strided((2, 1), (1, 2))
    mode = FakeTensorMode()
    for function in (torch.mul, torch.copysign, torch.logaddexp):
        with mode, run_on_fakes(mode):
            found = function(*map(mode.from_tensor, tensors))
        assert found.stride()[1:] == function(*tensors).stride()[1:]


_ROWS, _DOUBLES, _PLACES = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.float64), torch.tensor([0, 2])


@pytest.mark.parametrize(
    "call",
    [
        lambda: _ROWS @ _DOUBLES[0],
        lambda: _ROWS[:0] @ _DOUBLES[0],
        lambda: _ROWS.index_add(0, _PLACES, _DOUBLES[:2]),
        lambda: torch.heaviside(_ROWS, _DOUBLES),
        lambda: functional.nll_loss(_ROWS, torch.tensor([0, 1, 2]), _DOUBLES[0]),
        lambda: functional.batch_norm(_ROWS, None, None, _DOUBLES[0], training=True),
        lambda: functional.layer_norm(_ROWS, (4,), _DOUBLES[0]),
        lambda: _ROWS + _DOUBLES,
        lambda: torch.cat([_ROWS, _DOUBLES]),
        lambda: torch.where(_ROWS > 0, _ROWS, _DOUBLES),
    ],
)
def test_floats_of_two_types_are_refused_where_kernels_refuse_them(call: Callable[[], torch.Tensor]) -> None:
    try:
        expected: object = call().dtype
    except RuntimeError as error:
        expected = str(error)
    try:
        found: object = gradsplit.compile(call)().dtype
    except RuntimeError as error:
        found = str(error).splitlines()[0]
        expected = str(expected).splitlines()[0]
    assert found == expected


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, weight: functional.layer_norm(x, (8,), weight),
        lambda x, weight: functional.batch_norm(x, None, None, weight, training=True),
        lambda x, weight: functional.group_norm(x, 2, weight),
    ],
)
def test_norms_of_half_numbers_with_float_weights_are_compiled(
    norm: Callable[..., torch.Tensor], backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8, requires_grad=True)
    found = gradsplit.compile(norm, fullgraph=True, backend=backend)(x, weight)
    torch.testing.assert_close(found, norm(x, weight), atol=2e-2, rtol=2e-2)
    found.sum().backward()
    assert weight.grad is not None and not caplog.records
