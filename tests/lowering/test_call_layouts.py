"""Results of torch's kernels, which lie as their arguments do, where an argument lies otherwise than it was traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import gradsplit
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, same_strides
from gradsplit.compile_core.runtime.instructions import LaidOut
from gradsplit.compile_core.torch_facts.fake_tensors import run_operator


def empty_slice(x: torch.Tensor) -> torch.Tensor:
    x[0:2].fill_(7)
    x[3:3:3].fill_(9)  # left to torch's slice_scatter
    return x + 1


def every_other(x: torch.Tensor) -> torch.Tensor:
    x[0:2].mul_(2)
    x[::2].fill_(9)
    return (x * 3).flip(0)


@pytest.mark.parametrize("program", [empty_slice, every_other])
@pytest.mark.parametrize(
    ("size", "stride"), [((3, 4), (8, 1)), ((3, 4), (8, 2)), ((3, 1, 1), (2, 2, 1)), ((3, 4), (1, 3))]
)
def test_changed_inputs_with_gaps(program: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    memory = [torch.arange(64.0) for _ in range(2)]
    plain, twin = (one.as_strided(size, stride) for one in memory)
    expected = program(plain)
    found = gradsplit.compile(program, fullgraph=True)(twin)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert torch.equal(*memory)


def complex_angle(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x).transpose(-1, -2).angle().sin()


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.exp(), (1, 1, 1, 1), mode="reflect").sin()


def unpooled(x: torch.Tensor) -> torch.Tensor:
    pooled, places = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    return torch.nn.functional.max_unpool2d(pooled.sin(), places, 2).exp()


@pytest.mark.parametrize("program", [complex_angle, padded, unpooled])
def test_results_that_lie_otherwise_than_fake_ones(program: Any) -> None:
    x = torch.randn(2, 4, 6, 2).movedim(-1, 1) if program is not complex_angle else torch.randn(2, 3, 4, 2)
    expected, found = ([], [])
    for run, results in ((program, expected), (gradsplit.compile(program, fullgraph=True), found)):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        result = run(leaf)
        weights = torch.arange(float(result.numel())).view(result.shape)
        results += [result, *torch.autograd.grad((result * weights).sum(), leaf)]
    torch.testing.assert_close(found, expected)


def of_two(x: torch.Tensor) -> list[torch.Tensor]:
    """Operators whose forms in Python walk over their arguments in another order than the kernels."""
    operators = [
        torch.logaddexp, torch.logaddexp2, torch.logical_and, torch.xlogy, torch.special.xlog1py, torch.copysign,
        lambda a, b: torch.floor_divide(a.detach(), b.detach()), lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    ]  # fmt: skip
    x = x.exp()
    y, first = x.contiguous(), x[(0,) * x.dim()].detach()
    results = [call(*pair) for call in operators for pair in ((x, y), (y, x), (x, first), (first, x))]
    return [*results, torch.heaviside(x.detach(), y.detach()), torch.isin(x, y[0]), torch.isin(x, 1.0)]


def losses_of_elements(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.sigmoid()
    y, first = x.detach().contiguous(), x[:1].detach().expand_as(x)
    return [
        loss(*pair, reduction="none")
        for loss in (F.binary_cross_entropy, F.huber_loss, F.mse_loss, F.smooth_l1_loss)
        for pair in ((x, y), (y, x.detach()), (x, first), (first, x.detach()))
    ]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        of_two,
        losses_of_elements,
        lambda x: 2**x,
        lambda x: 2 ** x.sin(),
        F.logsigmoid,
        lambda x: F.one_hot(x.detach().argmax(-1).mT, 6) if x.dim() > 2 else x,
        lambda x: torch.complex(x, x).angle(),
        lambda x: torch.complex(x[:1].contiguous().expand_as(x), x).real * 2,
        lambda x: torch.ones(()).ldexp(x),
        lambda x: [torch.ones(()).double().ldexp(x.double()), x.ldexp(x.int()), x[:1].ldexp(x) * 2],
        lambda x: x[(x > 0).long().mT % 2] * 2,
        lambda x: torch.slice_scatter(x[:1].expand_as(x), x[:1] * 2, 0, 0, 1),
        lambda x: [F.rrelu(x), F.rrelu(x, 0.2, 0.2, training=True) * 2],
        lambda x: F.batch_norm(x, None, None, None, None, training=True),
        lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
        lambda x: [
            torch.fft.rfft(x, dim=0).abs(),
            torch.fft.fft(x, dim=1).abs(),
            torch.fft.rfft2(x, dim=(1, 0)).abs(),
        ],
        lambda x: [F.logsigmoid(x).reshape(-1)[part] for part in (slice(2), slice(3, None))],
    ],
)
@pytest.mark.parametrize(
    "x", [torch.randn(3, 6).t(), torch.randn(2, 5, 3).mT, torch.randn(2, 4, 5, 3).movedim(3, 1)]
)
def test_results_lie_as_those_of_the_kernels(x: torch.Tensor, program: Any, requires_grad: bool) -> None:
    """Where the kernels of the CPU keep no strides, and what torch says of fake tensors does."""
    x = x.clone().requires_grad_(requires_grad)
    found, expected = gradsplit.compile(program, fullgraph=True)(x), program(x)
    torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.poisson(x.abs()),
        lambda x: [torch.normal(x * 2, x.abs()), torch.normal(0.0, x.abs()), torch.normal(x, 1.0)],
        lambda x: [torch.multinomial(x.flatten(1).softmax(-1), 2), torch.rand_like(x.log_softmax(0))],
    ],
)
def test_random_numbers_are_drawn_in_the_order_of_eagers_memory(program: Any) -> None:
    x = torch.randn(4, 5).t()
    both = []
    for run in (program, gradsplit.compile(program, options={"fallback_random": True}, fullgraph=True)):
        torch.manual_seed(0)
        both.append(run(x))
    torch.testing.assert_close(both[1], both[0], check_stride=True)


_PLACES: list[Any] = []


@torch.library.custom_op(
    "tests_call_layouts::drawn", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def drawn(x: torch.Tensor) -> torch.Tensor:
    """Notes where it finds its elements."""
    _PLACES.append((x.stride(), x.storage_offset()))
    return x.clone()


@drawn.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x[:, 0],
        lambda x: x[1:],
        lambda x: x[:, 1:, ::2],
        lambda x: x.mT[0],
        lambda x: x[:1].expand(4, 5, 6),
        lambda x: x.flatten(0, 1)[1:],
        lambda x: x.chunk(2, -1)[1],
    ],
)
def test_random_operators_find_parts_where_eagers_lie(part: Any) -> None:
    """Kernels of GPUs draw several numbers a thread for a whole and aligned tensor, and one for another."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return drawn(part((x * 2).relu())) * 2

    x = torch.randn(4, 5, 6)
    _PLACES.clear()
    expected, found = program(x), gradsplit.compile(program, fullgraph=True)(x)
    torch.testing.assert_close(found, expected)
    assert len(_PLACES) == 2 and _PLACES[0] == _PLACES[1]


def of_images(x: torch.Tensor) -> list[torch.Tensor]:
    target = torch.zeros(2, 5, 5, dtype=torch.long)
    pooled, places = F.max_pool2d(x[..., :4, :4], 2, return_indices=True)
    padded = [F.pad(x, (1, 1) * 3, mode=mode) for mode in ("reflect", "replicate")]
    return [F.channel_shuffle(x, 2), F.max_unpool2d(pooled, places, 2), *padded] + [
        F.nll_loss(x, target, reduction=reduction) for reduction in ("none", "sum")
    ]


def test_results_of_kernels_that_know_channels_last() -> None:
    x = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    found, expected = gradsplit.compile(of_images, backend="aot_eager", fullgraph=True)(x), of_images(x)
    torch.testing.assert_close(found, expected, check_stride=True)


def random_layout(random: Random, shape: Sequence[int], high: int | None = None) -> torch.Tensor:
    order = random.sample(range(len(shape)), len(shape))
    size = [shape[dim] for dim in order]
    tensor = torch.randn(size) if high is None else torch.randint(high, size)
    return tensor.permute([order.index(dim) for dim in range(len(shape))])


def test_random_indices_on_fakes() -> None:
    """Of 3,000, torch's fakes got the strides of 443 wrong, and where an index had no dims the shape."""
    random = Random(0)
    index, strides = torch.ops.aten.index.Tensor, Counter()
    for _ in range(500):
        x = random_layout(random, random.choices((1, 2, 3), k=random.randint(1, 4)))
        shape = random.choices((1, 2, 3), k=random.randint(0, 3))
        indices: list[Any] = [
            random_layout(
                random, shape[random.randint(0, len(shape)) if random.random() < 0.2 else 0 :], size
            )
            if random.random() < 0.6
            else None
            for size in x.shape
        ]
        if not any(each is not None for each in indices):
            continue
        expected = index(x, indices)
        mode = FakeTensorMode()
        with mode:
            found = run_operator(index, tree_map_only(torch.Tensor, mode.from_tensor, (x, indices)), {})
        assert found.shape == expected.shape
        assert same_strides(expected.shape, found.stride(), expected.stride()), (x.stride(), indices)
        strides[expected.stride()] += 1
    assert len(strides) > 50


def test_nothing_is_selected_of_no_elements() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.roll(1, 1)
        y.select(0, 1).copy_(torch.ones(()))
        return y

    for call in (program, gradsplit.compile(program)):
        with pytest.raises(IndexError, match="index 1 out of range"):
            call(torch.zeros(0, 5))


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_indices_without_dims(backend: str) -> None:
    x, i, j = torch.randn(3, 3), torch.randint(3, (3, 3, 1)), torch.tensor(1)

    def program(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index.Tensor(x, [i, j]) * 2

    torch.testing.assert_close(
        gradsplit.compile(program, backend=backend, fullgraph=True)(x, i, j),
        program(x, i, j),
        check_stride=True,
    )


def margin_losses(x: torch.Tensor) -> list[torch.Tensor]:
    one, several = torch.tensor(1), torch.tensor([1, -1, 0, 0])
    return [
        loss
        for reduction in ("none", "mean")
        for loss in (
            F.multi_margin_loss(x[0], one, reduction=reduction),
            F.multi_margin_loss(x[:1], one[None], reduction=reduction),
            F.multilabel_margin_loss(x[0], several, reduction=reduction),
            F.multilabel_margin_loss(x[:1], several[None], reduction=reduction),
        )
    ]


def test_losses_of_one_sample() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    both = [run(x) for run in (margin_losses, gradsplit.compile(margin_losses, fullgraph=True))]
    torch.testing.assert_close(both[1], both[0], check_stride=True)
    expected, found = (torch.autograd.grad([loss.sum() for loss in losses], x) for losses in both)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_of_no_sample_keep_the_type_of_the_input(backend: str, reduction: str) -> None:
    """Nothing reads the weights, whose type may be another."""
    x, target, weight = torch.randn(0, 4, requires_grad=True), torch.arange(0), torch.ones(4).double()

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.multi_margin_loss(x, target, weight=weight, reduction=reduction) * 2

    loss = gradsplit.compile(program, backend=backend, fullgraph=True)(x)
    assert (loss.dtype, loss.shape) == (torch.float32, program(x).shape)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert gradient.dtype == torch.float32


def test_states_that_only_torch_reads_are_left_as_they_are() -> None:
    """A kernel of attention may tell of its random numbers in another size than on fake tensors, or not at all."""
    state, transposed = torch.ones(2), torch.ones(3, 4).t()
    specs = (TensorSpec.of(torch.ones(())), TensorSpec.of(torch.ones(2)), TensorSpec.of(torch.ones(4, 3)))
    kept, missing, copied = LaidOut(lambda: (state, None, transposed), specs, True)()
    assert kept is state and missing is None
    assert torch.equal(copied, transposed) and copied.is_contiguous()
