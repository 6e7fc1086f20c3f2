"""Programs of NumPy, and of NumPy and torch together, in captured code."""

# ruff: noqa: N803, N806 - arrays have the names that they have in the reference pages

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradsplit
from gradsplit.compile_core.errors import Unsupported
from tests.capture.same_as_plain import check_same

BACKENDS = ["eager", "aot_eager", "triton"]


def matrix():
    return (np.random.default_rng(torch.randint(100, ()).item()).standard_normal((4, 5)),)


def sum_of_products(X, Y):
    return np.sum(X[:, :, None] * Y[:, None, :], axis=(-2, -1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_in_and_out(backend):
    random = np.random.default_rng(0)
    X, Y = random.standard_normal((8, 4)), random.standard_normal((8, 4))
    compiled = gradsplit.compile(sum_of_products, backend=backend, fullgraph=True)
    for _ in range(2):
        Z = compiled(X, Y)
        assert isinstance(Z, np.ndarray)
        np.testing.assert_allclose(Z, sum_of_products(X, Y), rtol=1e-12)
    assert len(compiled.entries) == 1
    compiled(X[:3], Y[:3])
    np.testing.assert_allclose(compiled(X[:3], Y[:3]), sum_of_products(X[:3], Y[:3]), rtol=1e-12)


def there_and_back(X):
    t = torch.from_numpy(X)
    y = (t * 2).numpy()
    return torch.sin(torch.from_numpy(np.exp(y))), torch.tensor(X), torch.as_tensor(X).sum(), y


def returns_its_argument(X):
    return X, X[1:], X.T


def changes_its_argument(X):
    X[0] = 1
    X += 2
    X[:, 1] *= 3
    return X


def scalars(X):
    scale = np.float32(3)
    return X * scale, X.astype(np.float32) * scale + 1, np.sqrt(2.0) + X


def shapes(X):
    rows, columns = X.shape
    return np.zeros((columns, rows), dtype=X.dtype) + X.T, X.ndim, X.size, len(X), [row.sum() for row in X]


def asks_types(X):
    return isinstance(X, np.ndarray), X.dtype == np.float64, X.dtype.name, type(X) is np.ndarray


def elements(X):
    first, total, row = X[0, 0], X.sum(), X[1]
    before = total
    total += 1
    X[0, 0], X[1] = 5, 7
    return (
        first,
        total,
        before,
        row,
        np.max(X),
        np.asarray(first),
        X[..., 0, 0],
        first.astype(np.float32),
        ~X.argmax(),
    )


def numbers_beside_tensors(X):
    t = torch.from_numpy(X).float()
    made = torch.full((2,), np.float32(2)), t.clamp(max=np.float64(0.5)), t.new_zeros(np.int64(3))
    return t / np.sqrt(4), np.float32(2) * t, t * np.prod(X.shape), t < np.float64(0.1), *made


def copies(X):
    flat, same, rounded = X.flatten(), +X, X.round(9)
    flat[0], same[0], rounded[1] = 5, 6, 7
    return X, flat, same, rounded


def backwards(X):
    return X[::-1] + X[:, ::-1], np.flip(X).sum(0), (X[::-2, 1::2] * 2).sum(), np.sort(X)[:, ::-1].copy()


def of_all_elements(X):
    return np.median(X), np.percentile(X, 30), np.quantile(X, 0.3, axis=1)


def orders(X):
    return X.T.copy(), X.T.reshape(-1), X.T.ravel(), X.T + 1, np.rot90(X).copy()


PROGRAMS = [there_and_back, returns_its_argument, changes_its_argument, scalars, shapes, asks_types]
PROGRAMS += [elements, numbers_beside_tensors, copies, backwards, of_all_elements, orders]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_plain(program, backend):
    check_same(program, matrix, backend=backend)


def _changes_views(X):
    back, turned = X[::-1], np.flip(X, 1)
    back[0], turned[:, 0] = 5, 3
    return X, back, turned


def _changes_what_is_viewed(X):
    Y = X * 2
    back = Y[::-1]
    Y += 1
    return back * 1


def _shows_strides(X):
    return X[::-1].strides, X[::-1][1:]


def _asks_torch(X):
    try:
        return torch.from_numpy(X[::-1]) + 1
    except ValueError:
        return None


@pytest.mark.parametrize("program", [_changes_views, _changes_what_is_viewed, _shows_strides, _asks_torch])
def test_views_that_go_backwards_are_views(program):
    compiled = check_same(program, matrix, fullgraph=False)
    assert compiled.break_reasons


def test_lists_of_scalars_say_of_which_dtype_they_are():
    check_same(
        lambda x: (torch.tensor([np.float64(1), 2.0]), x.new_tensor(np.float64(2)), x * np.sqrt(2.0)),
        lambda: (torch.ones(2, requires_grad=True),),
        fullgraph=False,
    )


def test_an_argument_that_is_returned_is_the_same_object():
    X = np.ones(3)
    compiled = gradsplit.compile(lambda X: (X, X + 1), backend="eager", fullgraph=True)
    assert compiled(X)[0] is X


def test_a_view_shares_its_memory():
    X = np.zeros(3)
    view = gradsplit.compile(lambda X: X[1:], backend="eager", fullgraph=True)(X)
    view[0] = 5
    assert X[1] == 5


def test_a_graph_break_hands_out_real_arrays(capsys):
    def program(X):
        Y = X * 2
        print(type(Y).__name__, Y.sum())
        return np.sum(Y, axis=0)

    compiled = gradsplit.compile(program, backend="eager")
    X = np.ones((2, 3))
    assert np.array_equal(compiled(X), np.full(3, 4.0))
    assert capsys.readouterr().out == "ndarray 12.0\n"


class Special(np.ndarray):
    pass


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([np.datetime64("2020-01-01")]),
        np.ones(2, dtype=[("x", float)]),
        np.ma.masked_array([1.0, 2.0], mask=[True, False]),
        np.ones(2).view(Special),
        np.ones(2, dtype=np.uint16),
        np.ones(2, dtype=">f8"),
        np.ones(4)[::-1],
        np.broadcast_to(np.ones(1), (3,)),
    ],
    ids=[
        "strings",
        "dates",
        "structured",
        "masked",
        "subclass",
        "uint16",
        "big-endian",
        "reversed",
        "read-only",
    ],
)
def test_other_arrays_are_left_to_numpy(array):
    def program(X):
        return np.concatenate([X, X]), X.shape

    compiled = gradsplit.compile(program, backend="eager")
    expected, found = program(array), compiled(array)
    assert type(found[0]) is type(expected[0])
    assert found[0].dtype == expected[0].dtype
    assert found[0].tolist() == expected[0].tolist()
    with pytest.raises(Unsupported):
        gradsplit.compile(program, backend="eager", fullgraph=True)(array)


def test_arrays_that_share_memory_and_change():
    def program(X, Y):
        X += 1
        return X + Y

    compiled = gradsplit.compile(program, backend="aot_eager")
    X = np.zeros(4)
    assert np.array_equal(compiled(X[:3], X[1:]), [2.0, 2.0, 1.0])


def test_trace_numpy_can_be_turned_off():
    compiled = gradsplit.compile(lambda X: np.sum(X), backend="eager", fullgraph=True)
    with gradsplit.config.patch(trace_numpy=False), pytest.raises(Unsupported):
        compiled(np.ones(3))
    assert compiled(np.ones(3)) == 3


def test_random_numbers_are_numpys_own():
    compiled = gradsplit.compile(lambda X: X + np.random.rand(3), backend="eager")
    np.random.seed(0)
    found = compiled(np.zeros(3))
    np.random.seed(0)
    assert np.array_equal(found, np.random.rand(3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrap_numpy_is_differentiable(backend):
    @gradsplit.compile(backend=backend, fullgraph=True)
    @gradsplit.wrap_numpy
    def program(X, Y):
        return np.mean(np.sum(X[:, :, None] * Y[:, None, :], axis=(-2, -1)))

    X, Y = torch.randn(8, 4, dtype=torch.float64, requires_grad=True), torch.randn(8, 4, dtype=torch.float64)
    Z = program(X, Y)
    assert isinstance(Z, torch.Tensor)
    Z.backward()
    expected = (X.detach()[:, :, None] * Y[:, None, :]).sum((-2, -1)).mean()
    torch.testing.assert_close(Z.detach(), expected)
    torch.testing.assert_close(X.grad, Y.sum(1, keepdim=True).expand_as(X) / 8)


def test_wrap_numpy_uncompiled():
    found = gradsplit.wrap_numpy(lambda X: {"sum": np.sum(X), "more": X + 1})(torch.ones(3))
    assert torch.equal(found["sum"], torch.tensor(3.0))
    assert torch.equal(found["more"], torch.full((3,), 2.0))


def test_a_default_device():
    compiled = gradsplit.compile(sum_of_products, backend="eager", fullgraph=True)
    X = np.ones((2, 3))
    with torch.device("cpu"):
        assert isinstance(compiled(X, X), np.ndarray)


def test_an_operator_that_cannot_be_traced_runs_with_torchs_kernels():
    compiled = gradsplit.compile(lambda X: np.linalg.inv(X), backend="aot_eager", fullgraph=True)
    X = np.eye(3) * 2
    assert np.array_equal(compiled(X), np.eye(3) / 2)


def decay(x):
    return x * torch.exp(torch.arange(x.shape[-1]) * -(np.log(float(10000)) / (x.shape[-1] - 1)))


def lengths(x):
    half = int(np.ceil(x.shape[1] / 2))
    return x[:, :half].reshape(np.prod((x.shape[0], half))), range(np.int64(half)), np.int64(half).item()


def decides(x):
    steps = np.log2(16.0) + 1
    if steps > 4 and not np.isnan(steps):
        x = x.sum() / steps
    return np.float32(2) * x ** np.clip(3.5, 0, 2), steps


@pytest.mark.parametrize("program", [decay, lengths, decides])
def test_what_numpy_makes_of_numbers_is_a_number(program):
    check_same(program, lambda: (torch.randn(2, 5, requires_grad=True),))


class Scaled(torch.nn.Module):
    """Its numbers are NumPy's, as programs get them that compute them when they make their modules."""

    def __init__(self):
        super().__init__()
        self.scale = np.sqrt(10.0)
        self.small = np.float32(0.3)
        self.groups = np.int64(2)
        self.rates = np.bool_(True)

    def forward(self, x):
        x = x / self.scale + x.abs() ** self.scale * self.small
        for group in range(self.groups):
            x = x.reshape(self.groups, -1) + group
        return (x if self.rates else -x) * (self.scale > 3), self.scale


def test_scalars_on_a_module_are_numbers():
    module = Scaled()
    compiled = gradsplit.compile(module, backend="eager", fullgraph=True)

    def check():
        x = torch.randn(4, 3)
        found, scale = compiled(x)
        assert torch.equal(found, module(x)[0]) and scale is module.scale

    check()
    check()
    assert len(compiled._run.entries) == 1
    module.rates = np.bool_(False)
    check()
    module.rates = np.bool_(True)
    check()
    assert len(compiled._run.entries) == 2
    module.scale, module.groups = np.sqrt(2.0), np.int64(3)
    check()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_a_float_that_differs_is_open(dtype):
    compiled = gradsplit.compile(lambda x, rate: (x * rate + rate, rate), backend="eager", fullgraph=True)
    x = torch.randn(4, 3, dtype=torch.bfloat16)
    for value in (0.1, 0.2, 0.0, -0.0, float("nan"), float("inf"), 0.1):
        rate = dtype(value)
        found, returned = compiled(x, rate)
        torch.testing.assert_close(found, x * rate + rate, rtol=0, atol=0, equal_nan=True)
        assert type(returned) is dtype and returned.tobytes() == rate.tobytes()
    assert len(compiled.entries) == 2
