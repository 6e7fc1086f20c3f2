"""A loss over a vocabulary by chunks: the plain numbers within what float64 allows, and nothing wide in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core import passes
from gradsplit.compile_core.autograd.operators.linear_nodes import is_zero
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.chunk_rows import chunk_rows
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.row_chunks import ADD_PRODUCT, ADD_PRODUCT_, AFTER, WIDE_PRODUCT
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.verify_graphs import verify_joint, verify_partition
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.autograd import random_losses
from tests.autograd.compare_with_eager import captured, fakes
from tests.lowering.move_graph import on_gpu

ROWS, WIDTH, VOCABULARY = 24, 2, 50
# Of the logits of seven rows, in float32.
CHUNK_BYTES = 7 * VOCABULARY * 4
Loss = Callable[[Tensor, Tensor], Tensor]


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1, ignore_index=3)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(3 * torch.tanh(logits / 3), labels, ignore_index=3)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=logits.dtype)
    return F.cross_entropy(logits, labels, weight, ignore_index=3, label_smoothing=0.2)


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    losses, mask = F.cross_entropy(logits, labels, reduction="none"), labels % 3 != 0
    return (losses * mask).sum() / mask.sum()


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return -torch.log_softmax(logits / 0.7, -1).gather(-1, labels[..., None]).mean()


def in_sequences(logits: Tensor, labels: Tensor) -> Tensor:
    """As the transformers package has it: batch and time are apart, labels are shifted, the last has none."""
    shifted = F.pad(labels.view(2, -1), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(2, -1, VOCABULARY).double().view(-1, VOCABULARY), shifted.view(-1))


def cut_off(logits: Tensor, labels: Tensor) -> Tensor:
    """The last logits of each sequence have no labels."""
    logits = logits.view(2, -1, VOCABULARY)[..., :-1, :].contiguous()
    return F.cross_entropy(
        logits.view(-1, VOCABULARY), labels.view(2, -1)[..., 1:].reshape(-1), ignore_index=3
    )


def capped_and_cut_off(logits: Tensor, labels: Tensor) -> Tensor:
    logits = (3 * torch.tanh(logits.double() / 3)).view(2, -1, VOCABULARY)[:, 2:]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.view(2, -1)[:, :-2].flatten())


def distilled(logits: Tensor, labels: Tensor) -> Tensor:
    targets = torch.softmax(torch.arange(VOCABULARY, device=labels.device) * 0.1 + labels[:, None], -1).to(
        logits.dtype
    )
    return F.kl_div(torch.log_softmax(logits, -1), targets, reduction="batchmean")


def with_bias_of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits + torch.arange(VOCABULARY, device=labels.device) * 0.01, labels)


LOSSES: dict[str, Loss] = {
    "mean": lambda logits, labels: F.cross_entropy(logits, labels),
    "ignored": lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=3),
    "sum": lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=3, reduction="sum"),
    **{
        loss.__name__: loss
        for loss in (
            smoothed, capped, weighted, masked_mean, with_z_loss, focal, likelihood, in_sequences, distilled, cut_off,
            capped_and_cut_off,
            with_bias_of_classes,
        )
    },
}  # fmt: skip


def values(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the head, its weight and bias, and labels of which some are 3."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[::5] = 3
    return x, weight, bias, labels


def program(loss: Loss, with_bias: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return loss(F.linear(x, weight, bias if with_bias else None), labels)

    return run


def joint_of(run: Callable[..., Any], *inputs: Tensor, device_type: str = "cpu") -> JointGraph:
    return trace_joint(captured(run), fakes(inputs), decomposition_table(device_type))


def chunked(joint: JointGraph, chunk_bytes: int = CHUNK_BYTES) -> JointGraph:
    after = chunk_rows(copy.deepcopy(joint), chunk_bytes)
    verify_joint(after)
    return after


def widest(graph: torch.fx.Graph) -> int:
    """Elements of the largest value, but for constants, which need no memory."""
    return max(node.meta["val"].numel() for node in graph.nodes if "val" in node.meta and not is_zero(node))


def is_chunked(joint: JointGraph) -> bool:
    return bool(joint.module.graph.find_nodes(op="call_function", target=AFTER))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_computed_by_chunks(name: str, with_bias: bool, device_type: str) -> None:
    run, inputs = program(LOSSES[name], with_bias), values(torch.float64)
    plain = joint_of(run, *inputs, device_type=device_type)
    after = chunked(plain, 2 * CHUNK_BYTES)
    assert is_chunked(after)
    assert widest(plain.module.graph) == ROWS * VOCABULARY
    assert widest(after.module.graph) <= 8 * VOCABULARY
    for arriving in (1.0, -1 / 3, 0.0):
        tangent = torch.tensor(arriving, dtype=torch.float64)
        expected, actual = plain.module(*inputs, tangent), after.module(*inputs, tangent)
        for one, other in zip(actual, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
                assert one.stride() == other.stride()


@pytest.mark.parametrize("name", LOSSES)
def test_the_forward_computes_the_gradient(name: str) -> None:
    graph = partition(chunked(joint_of(program(LOSSES[name], True), *values())))
    joint = chunked(joint_of(program(LOSSES[name], True), *values()))
    verify_partition(joint, graph)
    assert graph.backward is not None
    assert not graph.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert graph.saved_bytes <= 4 * ((ROWS + VOCABULARY) * WIDTH + VOCABULARY)


@pytest.mark.parametrize("wanted", ["all", "of the weight", "none"])
def test_one_chunk_is_in_memory_at_a_time(wanted: str) -> None:
    x, weight, bias, labels = values()
    is_inference = wanted == "none"
    with torch.set_grad_enabled(not is_inference):
        inputs = (x if wanted == "all" else x.detach(), weight, bias, labels)
        joint = chunked(joint_of(program(LOSSES["mean"], False), *inputs, device_type="cuda"))
    assert is_chunked(joint)
    forward = partition(joint).forward
    (compute,) = whole_schedule("forward", on_gpu(forward), {}, 1).computes
    loops = batch_nests(fuse(lower(compute)))
    wide = [name for name, spec in loops.buffers.items() if spec.numel == ROWS // 4 * VOCABULARY]
    alive = alive_together(loops, wide)
    assert wide and alive == (1 if is_inference else 2)
    totals = [step for step in loops.steps if isinstance(step, ExternCall) and step.target is ADD_PRODUCT_]
    assert len(totals) == (0 if is_inference else 3)
    assert len({step.arguments[0].buffer for step in totals}) <= 1


def alive_together(loops: LoopProgram, names: list[str]) -> int:
    """How many of the buffers are in memory at once, at most."""
    spans = []
    for name in names:
        touching = [k for k, step in enumerate(loops.steps) if name in reads(step) | writes(step)]
        spans.append((touching[0], touching[-1]))
    return max(sum(first <= k <= last for first, last in spans) for k in range(len(loops.steps)))


class Head(nn.Module):
    """An embedding, something between, and a head, which may be the embedding's table."""

    def __init__(self, loss: Loss, tied: bool, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.between(self.embedding(tokens)))), labels)


def trained(model: nn.Module, call: Callable[..., Tensor], inputs: Any, factor: float) -> list[Tensor]:
    """The loss and all gradients of two steps, which are added up."""
    model.zero_grad()
    for _ in range(2):
        loss = call(*inputs)
        (loss * factor).backward()
    return [
        loss.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", LOSSES)
def test_compiled_steps_are_as_exact_as_plain_ones(
    name: str, tied: bool, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    torch.manual_seed(1)
    model = Head(LOSSES[name], tied, bias)
    exact = copy.deepcopy(model).double()
    labels = values()[3]
    inputs = labels.roll(1), labels
    compiled = gradsplit.compile(model, options={"chunk_bytes": CHUNK_BYTES * dtype.itemsize // 4})
    for factor in (1.0, 1 / 3):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            plain = trained(model, model, inputs, factor)
            actual = trained(model, compiled, inputs, factor)
        expected = trained(exact, exact, inputs, factor)
        for mine, theirs, right in zip(actual, plain, expected, strict=True):
            size = right.norm() + 1e-30
            limit = 2 * (theirs.double() - right).norm() / size + 4 * torch.finfo(dtype).eps
            assert (mine.double() - right).norm() / size <= limit
    assert seen == [True]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each graph that is compiled whether anything of it is done by chunks."""
    seen: list[bool] = []

    def noted(joint: JointGraph, chunk_bytes: int) -> JointGraph:
        after = chunk_rows(joint, chunk_bytes)
        seen.append(is_chunked(after))
        return after

    monkeypatch.setattr(passes, "chunk_rows", noted)
    return seen


def test_an_option_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    model, labels = Head(LOSSES["mean"], True, False), values()[3]
    for options, expected in (
        ({"chunk_bytes": 0}, []), ({}, [False]), ({"chunk_bytes": CHUNK_BYTES}, [True]),
        ({"chunk_bytes": CHUNK_BYTES, "skip_passes": ["chunk_rows"]}, []),
    ):  # fmt: skip
        seen.clear()
        gradsplit.compile(copy.deepcopy(model), options=options)(labels, labels).backward()
        assert seen == expected
    seen.clear()
    gradsplit.compile(copy.deepcopy(model), backend="aot_eager")(labels, labels).backward()
    assert seen == []


def test_rewritten_products_are_not_cast_by_the_autocast_around_the_call(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes add to the joint graph, whose casts are the program's own, is traced again."""
    seen = watch(monkeypatch)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    x, labels = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (ROWS,))

    def in_float32(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(F.linear(x, weight), labels)

    def results(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(x)
        return value, *torch.autograd.grad(value, (x, weight))

    compiled = results(gradsplit.compile(in_float32, options={"chunk_bytes": CHUNK_BYTES}))
    assert seen == [True]
    torch.testing.assert_close(compiled, results(in_float32))
    assert not caplog.records


def returned(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, labels), logits


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def perplexity(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels).exp()


def two_numbers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, labels), logits.logsumexp(-1).mean()


def dropped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(logits, 0.5), labels)


def sorted_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.sort(-1).values, labels)


def over_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits - logits.mean(0), labels)


@pytest.mark.parametrize("loss", [returned, each, perplexity, two_numbers, dropped, sorted_rows, over_rows])
def test_what_needs_all_rows_or_more_than_a_number_is_left_alone(loss: Any) -> None:
    plain = joint_of(program(loss, False), *values())
    assert not is_chunked(chunked(plain))


def test_float16_is_left_alone_where_a_gradient_is_computed() -> None:
    inputs = values(torch.float16)
    assert not is_chunked(chunked(joint_of(program(LOSSES["mean"], False), *inputs), CHUNK_BYTES // 2))
    inputs = tuple(tensor.detach() for tensor in inputs)
    assert is_chunked(chunked(joint_of(program(LOSSES["mean"], False), *inputs), CHUNK_BYTES // 2))


def test_small_products_are_left_alone() -> None:
    plain = joint_of(program(LOSSES["mean"], False), *values())
    size = ROWS * VOCABULARY * 4
    assert not is_chunked(chunked(plain, size // 2))
    assert is_chunked(chunked(plain, size // 2 - 1))


def test_layers_that_widen_are_left_alone() -> None:
    def feed_forward(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, weight)), weight.t()).sum()

    for with_gradients in (True, False):
        inputs = [tensor if with_gradients else tensor.detach() for tensor in values()]
        assert not is_chunked(chunked(joint_of(feed_forward, *inputs)))


def test_a_loss_in_a_checkpoint_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    run = program(LOSSES["mean"], False)

    def checkpointed(*inputs: Tensor) -> Tensor:
        return checkpoint(run, *inputs, use_reentrant=False)

    gradsplit.compile(checkpointed, options={"chunk_bytes": CHUNK_BYTES})(*values()).backward()
    assert seen == [False]


def test_open_numbers_of_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    x, weight, bias, labels = values()
    compiled = gradsplit.compile(program(LOSSES["mean"], False), options={"chunk_bytes": CHUNK_BYTES})
    for rows in (ROWS, ROWS - 1, ROWS - 2):
        loss = compiled(x[:rows], weight, bias, labels[:rows])
        torch.testing.assert_close(loss, F.cross_entropy(x[:rows] @ weight.t(), labels[:rows]))
    assert seen == [True, False]


def test_gradients_that_are_not_wanted_are_not_computed() -> None:
    x, weight, bias, labels = values()
    for given, count in (((x.detach(), weight), 1), ((x, weight.detach()), 0)):
        joint = chunked(joint_of(program(LOSSES["mean"], False), *given, bias.detach(), labels))
        assert is_chunked(joint)
        totals = joint.module.graph.find_nodes(op="call_function", target=ADD_PRODUCT)
        assert (len(totals) > 0) == bool(count)


def test_every_row_may_be_ignored() -> None:
    x, weight, bias, labels = values()
    labels = torch.full_like(labels, -100)
    run = program(LOSSES["mean"], True)
    results = []
    for call in (run, gradsplit.compile(run, options={"chunk_bytes": CHUNK_BYTES})):
        inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        loss = call(*inputs, labels)
        loss.backward()
        results.append([loss.detach(), *(tensor.grad for tensor in inputs)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_are_added_up_in_float32(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 128), (128, 32), (64, 32))
    left, right, total = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    left, right = left.bfloat16(), right.bfloat16()
    product = left.double() @ right.double()
    # On a CPU torch rounds a product before it is added.
    rounding = {"cpu": 0.1, "cuda": 1e-4}[device]
    for operator in (ADD_PRODUCT, ADD_PRODUCT_):
        given = total.clone()
        result = operator(given, left.t().contiguous().t(), right)
        assert result.dtype is torch.float32 and (result is given) == (operator is ADD_PRODUCT_)
        assert torch.equal(given, total) == (operator is ADD_PRODUCT)
        torch.testing.assert_close(result.double(), total + product, rtol=rounding, atol=rounding)
    wide = WIDE_PRODUCT(left, right)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide.double(), product, rtol=rounding, atol=rounding)
    same = total.double()
    torch.testing.assert_close(ADD_PRODUCT(same, left.double(), right.double()), same + product)


def check_random_loss(seed: int) -> bool:
    """Whether anything was done by chunks; the values are the plain graph's."""
    x, weight, bias, labels = (tensor.detach() for tensor in values(torch.float64, seed))
    inputs = (x, weight[: random_losses.VOCABULARY], bias[: random_losses.VOCABULARY])
    inputs = (*(tensor.clone().requires_grad_() for tensor in inputs), labels % random_losses.VOCABULARY)
    plain = joint_of(random_losses.random_loss(seed), *inputs)
    after = chunked(plain, 4 * random_losses.VOCABULARY * 8)
    tangents = [torch.tensor(0.3, dtype=torch.float64)] * len(plain.tangents)
    expected, actual = plain.module(*inputs, *tangents), after.module(*inputs, *tangents)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, equal_nan=True)
            assert one.stride() == other.stride()
    return is_chunked(after)


def test_random_losses() -> None:
    done = [check_random_loss(seed) for seed in range(60)]
    assert sum(done) > 25


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_over_an_odd_vocabulary_on_a_gpu(tied: bool, mode: str) -> None:
    """As exact as the plain graph, in the memory of some chunks, over several steps."""
    rows, width, vocabulary = 8192, 64, 16001
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=not tied)).cuda()
    if tied:
        model[1].weight = model[0].weight
    exact = copy.deepcopy(model).double()
    tokens, labels = torch.randint(vocabulary, (2, rows), device="cuda")
    labels[::9] = -100

    def loss(module: nn.Module) -> Tensor:
        return F.cross_entropy(module(tokens).float(), labels)

    logits_bytes = rows * vocabulary * 2
    settings = {"chunk_bytes": logits_bytes // 8, "triton.cudagraphs": mode == "reduce-overhead"}
    compiled = gradsplit.compile(loss, fullgraph=True, options=settings)
    (loss(exact) / 3).backward()
    for _ in range(4):
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            (compiled(model) / 3).backward()
        peak = torch.cuda.max_memory_allocated() - before
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert (mine.grad.double() - theirs.grad).norm() <= 1e-2 * theirs.grad.norm()
    assert mode == "reduce-overhead" or peak < logits_bytes


@pytest.mark.parametrize("arriving", [(True, True), (True, False), (False, True)])
def test_other_results_get_gradients_of_their_own(
    arriving: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)

    def run(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits, labels), (x.log() * weight[:ROWS]).sum(), logits.argmax(-1)

    x, weight, _, labels = values()
    compiled = gradsplit.compile(run, options={"chunk_bytes": CHUNK_BYTES})
    results = []
    calls: Any = (run, compiled)
    for call in calls:
        inputs = [tensor.detach().abs().requires_grad_() for tensor in (x, weight)]
        loss, other, best = call(*inputs, labels)
        torch.autograd.backward(
            [result for result, wanted in zip((loss, other), arriving, strict=True) if wanted]
        )
        results.append([loss.detach(), other.detach(), best, *(tensor.grad for tensor in inputs)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert seen == [True]
