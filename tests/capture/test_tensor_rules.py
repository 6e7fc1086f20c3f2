"""Tensor methods and functions of torch that are more than an operation: metadata, leaves, types, operators by name."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from gradsplit.compile_core.errors import Unsupported
from tests.autograd.scenarios import outcome
from tests.capture.same_as_plain import check_same


def changes_metadata(x):
    y = x * 2
    y.t_()
    z = (x + 1).unsqueeze_(0)
    z.squeeze_(0).transpose_(0, 1)
    return y, y.shape, z + y, z.stride()


def a_view_keeps_its_metadata(x):
    y = x * 2
    view = y[0]
    y.t_()
    return view + 1, y


def copies_what_has_gaps(x):
    y = x.repeat(2, 2).detach()[:, ::2]
    y.fill_(1)
    z = y.contiguous()
    return z.add_(1), y, y.contiguous() is y


def makes_a_leaf(x):
    y = (x.detach() * 2).requires_grad_()
    z = y.requires_grad_(True)
    return (z * 3).sum(), y.requires_grad, z is y


def stores_that_it_is_a_leaf(x):
    y = x.detach()[:, None]
    y.requires_grad = True
    z = y * x
    y.requires_grad = True
    return z.sum(), y.requires_grad, (x * 2).detach().requires_grad_(False)


def types(x):
    return (
        torch.result_type(x, 1.0), torch.result_type(x.long(), 1), torch.is_same_size(x, x * 2),
        isinstance(x, torch.FloatTensor), isinstance(x.long(), torch.LongTensor), isinstance(x, torch.LongTensor),
        x.type(), x.to(torch.complex64).type(),
    )  # fmt: skip


def limits(x):
    return x + torch.finfo(x.dtype).eps, torch.iinfo(torch.int32).max, torch.finfo().max


def operators_by_name(x):
    return torch.ops.aten.add(x, 1), torch.ops.aten.sin.default(x), torch.ops.aten.max.dim(x, 1)


def items(x):
    y = x.clone()
    y.__setitem__(0, 1.0)
    return x.__getitem__(1), torch.Tensor.__getitem__(x, 0), y


def distributions(x):
    normal = torch.distributions.Normal(x, 1.0, validate_args=False)
    return normal.log_prob(x + 1), normal.rsample(), normal.entropy()


def attributes(x):
    x.count = getattr(x, "count", 0) + 1
    y = x.sin()
    y.source, y.itself = x, y
    y += 1
    return y, x.count, hasattr(y * 2, "source"), y.source is x, y.itself is y, y.view(-1)


PROGRAMS = [
    attributes, changes_metadata, a_view_keeps_its_metadata, copies_what_has_gaps, makes_a_leaf, types, limits,
    stores_that_it_is_a_leaf,
    operators_by_name, items,
    distributions,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_plain(program, backend):
    check_same(program, lambda: (torch.randn(3, 4, requires_grad=True),), backend=backend)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * getattr(x, "factor", 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@gradsplit.allow_in_graph
def scaled(x):
    return x * getattr(x, "factor", 1)


def marked(x):
    y = x.sin()
    y.factor = 2
    return y


@pytest.mark.parametrize(
    "program",
    [
        lambda x: Scaled.apply(marked(x)),
        lambda x: scaled(marked(x)),
        lambda x: checkpoint(marked, x, use_reentrant=False).factor * x,
        lambda x: (gradsplit.graph_break(marked(x)), setattr(x, "factor", 3), scaled(x))[2],
    ],
)
def test_attributes_are_there_where_others_read_them(program):
    check_same(program, lambda: (torch.randn(3, requires_grad=True),), fullgraph=False)


def test_a_leaf_gathers_its_own_gradient():
    compiled = gradsplit.compile(
        lambda x: (x * 2).detach().requires_grad_(), backend="aot_eager", fullgraph=True
    )
    leaf = compiled(torch.ones(2))
    assert leaf.is_leaf
    (leaf * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.t_(),
        lambda x: x.requires_grad_(),
        lambda x: setattr(x, "requires_grad", True),
        lambda x: torch.autograd.grad(x.clone().requires_grad_() * 2, x, x[None], is_grads_batched=True),
        lambda x: (x * 2).resize_(2),
    ],
)
def test_refused(program):
    with pytest.raises(Unsupported):
        gradsplit.compile(program, backend="eager", fullgraph=True)(torch.randn(3, 4))


@pytest.mark.parametrize("wanted", [True, False, 1])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
@pytest.mark.parametrize("by", ["requires_grad", "requires_grad_"])
def test_what_must_not_require_gradients_raises_as_plain_python_does(by, kind, wanted):
    def program(x):
        found = []
        for y in (x.detach().to(kind) * 2, x * 2, x):
            try:
                setattr(y, by, wanted) if by == "requires_grad" else y.requires_grad_(wanted)
                found.append(y.requires_grad)
            except (RuntimeError, TypeError) as error:
                found.append(type(error))
        return found

    check_same(program, lambda: (torch.randn(3, requires_grad=True),), fullgraph=False)


def test_an_argument_that_changes_its_metadata():
    def program(x):
        x.t_()
        return x * 2

    check_same(program, lambda: (torch.randn(3, 4),), fullgraph=False)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x + x.storage_offset(),
        lambda x: x[1:] + x[1:].storage_offset() + (x * 2)[1:].storage_offset(),
        lambda x: x.as_strided((2,), (1,), 1) * 2,
        lambda x: torch.as_strided(x[1:], (2,), (2,), storage_offset=0).exp(),
        lambda x: x.as_strided((2,), (1,), x.storage_offset()) * 2,
        lambda x: (x * 2).as_strided((2,), (1,), 3) + x.as_strided((2,), (1,)),
        lambda x: x.fill_diagonal_(5) * 2,
        lambda x: x[:, 1:].fill_diagonal_(-1).clone() + x.clone().fill_diagonal_(0).sum(),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_where_a_tensor_begins_in_its_storage(program, backend):
    compiled = gradsplit.compile(program, backend=backend)
    ours, plain = torch.arange(24.0), torch.arange(24.0)
    for offset in (0, 8, 4, 0):
        x, y = (storage[offset : offset + 8].view(2, 4) for storage in (ours, plain))
        assert torch.equal(compiled(x), program(y))
        assert torch.equal(ours, plain)


def strided_after_a_write(x):
    y = x.mT * 2
    y.index_add_(0, torch.tensor([0]), y[:1].clone())
    return y.as_strided((2, 2), (1, 1))


def strided_out_of_the_argument(x):
    x[0].as_strided((6,), (1,)).add_(0.5)
    return x * 2


def strided_outside(row):
    row.as_strided((6,), (1,)).add_(0.5)
    return row * 2


def writes_to_chunks(x):
    first, second = x.unsafe_chunk(2)
    first.add_(second)
    torch.unsafe_split(x, 1)[1].mul_(3)
    return first * 2


@pytest.mark.parametrize(
    ("program", "of"),
    [
        (strided_after_a_write, lambda x: x),
        (strided_out_of_the_argument, lambda x: x),
        (strided_outside, lambda x: x[0]),
        (writes_to_chunks, lambda x: x),
    ],
)
def test_memory_that_functionalization_does_not_follow(program, of):
    ours, plain = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4)
    assert torch.equal(gradsplit.compile(program, backend="triton")(of(ours)), program(of(plain)))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("backend", ["aot_eager", DEFAULT_BACKEND])
def test_a_view_keeps_the_gradient_of_its_own_place(backend):
    """It was made before the tensor was transposed in place."""

    def program(x):
        y = x * 2
        view = y.unsqueeze(0)
        y.t_().add_(1)
        return view * 3, y

    def gradient(run):
        x = torch.ones(2, 3, requires_grad=True)
        view, y = run(x)
        assert y.shape == (3, 2) and view.shape == (1, 2, 3)
        torch.autograd.backward(
            [view, y], [torch.arange(6.0).view(1, 2, 3), torch.arange(6.0).view(3, 2) ** 2]
        )
        return x.grad

    assert torch.equal(
        gradient(gradsplit.compile(program, fullgraph=True, backend=backend)), gradient(program)
    )


class Weight(torch.nn.Parameter):
    """As programs have them that say how their weights are loaded or cut."""

    kind = "weight"

    def __new__(cls, data, scale):
        made = super().__new__(cls, data)
        made.scale = scale
        return made

    @property
    def scaled(self):
        return self * self.scale

    def half(self):
        return self / 4


def test_parameters_of_a_class_of_the_programs():
    def program(x, w):
        y = x @ w + w.scaled + w.half() + len(w.kind)
        return y, type(w) is Weight, type(w + 1) is torch.Tensor, w

    def arguments():
        return torch.randn(3, 3, requires_grad=True), Weight(torch.randn(3, 3), 2.0)

    compiled = gradsplit.compile(program, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x, w = arguments()
        found, expected = compiled(x, w), program(x, w)
        assert torch.equal(found[0], expected[0]) and found[1:3] == expected[1:3] and found[3] is w
        one, other = (torch.autograd.grad(result[0].sum(), (x, w)) for result in (found, expected))
        torch.testing.assert_close(one, other)


def test_a_class_with_operators_of_its_own_is_no_plain_tensor():
    class Adds(torch.nn.Parameter):
        def __add__(self, other):
            return self * 3

    compiled = gradsplit.compile(lambda x, w: (x * 2, w + 1), backend="eager")
    assert torch.equal(compiled(torch.ones(2), Adds(torch.ones(2)))[1], torch.full((2,), 3.0))


@pytest.mark.parametrize("function", [torch.sum, torch.prod, torch.any, torch.cumsum, torch.mean])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
def test_out_of_another_dtype(function, dtype):
    """Some operators then compute in that dtype, and some refuse it."""

    def program(x, out):
        return function(x, 0, out=out), out

    x = torch.tensor([[1.6, -2.7, 3.5], [0.7, 0.8, -1.9]])
    runs = (program, gradsplit.compile(program))
    expected, given = (outcome(run, x, torch.zeros(function(x, 0).shape, dtype=dtype)) for run in runs)
    if isinstance(expected[0], str):
        assert given == expected
    else:
        torch.testing.assert_close(given, expected, rtol=0, atol=0)


def test_out_that_is_also_read():
    """It is resized before it is read."""

    def program():
        x = torch.zeros(0, 3)
        return torch.sum(x, 0, out=x), x

    compiled = gradsplit.compile(program)
    torch.testing.assert_close(compiled(), program(), rtol=0, atol=0)
    with pytest.raises(gradsplit.CompileError, match="resized"):
        gradsplit.compile(program, fullgraph=True)()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_another_dtype_and_size_runs_plainly():
    """A leaf that was used before keeps the size of its gradient."""

    def program(x, y):
        both = torch.column_stack([x, x])
        with torch.no_grad():
            torch.sin(y, out=x)
        return both, x * 2

    gradients = []
    for call in (program, gradsplit.compile(program)):
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        call(x, torch.ones(1, 1, dtype=torch.int64))[1].sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_loss_has_the_dtype_of_its_targets():
    def program(x, target):
        return torch.nn.functional.binary_cross_entropy_with_logits(x, target) * 2

    x, target = torch.randn(5, dtype=torch.float64), torch.rand(5)
    assert gradsplit.compile(program)(x, target).dtype == program(x, target).dtype
