"""Checkpoints and their policies are obeyed: counted by what is saved and by the operators of the backward."""

from __future__ import annotations

import functools
import inspect
from collections import Counter, defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import gradsplit
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from tests.capture.same_as_plain import check_same

aten = torch.ops.aten
BACKENDS = ["aot_eager", "triton"]

checkpointed = functools.partial(checkpoint, use_reentrant=False)


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def compiled_parts(program, make_inputs, backend="aot_eager", **options) -> PartitionedGraph:
    """The program's two parts, after its results and gradients were found to be eager's."""
    compiled = check_same(program, make_inputs, backend=backend, **options)
    (entry,) = compiled.entries
    return entry.compiled.partitioned


def operators(graph: PartitionedGraph) -> Counter[object]:
    assert graph.backward is not None
    return Counter(node.target for node in graph.backward.graph.nodes if node.op == "call_function")


def saved_shapes(graph: PartitionedGraph) -> list[tuple[int, ...]]:
    """Of the saved values that are no inputs."""
    assert graph.backward is not None
    inputs = {node.name for node in graph.forward.graph.find_nodes(op="placeholder")}
    names = [name for name in graph.saved if name not in inputs]
    nodes = {node.name: node for node in graph.backward.graph.find_nodes(op="placeholder")}
    return [tuple(nodes[name].meta["val"].shape) for name in names]


# Whole regions: inputs are saved, nothing inside.


def narrow(x, w):
    return (x @ w).sin()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wide_input_is_saved_rather_than_something_small_inside(backend):
    def program(x, w):
        return checkpointed(narrow, x * 2, w)

    def inputs():
        return leaf(16, 16), leaf(16, 2)

    graph = compiled_parts(program, inputs, backend)
    assert operators(graph)[aten.mm.default] == 3
    assert saved_shapes(graph) in ([], [(16, 16)])  # x * 2 is computed again where that is a kernel's work
    assert operators(compiled_parts(lambda x, w: narrow(x * 2, w), inputs, backend))[aten.mm.default] == 2


def block(x, w1, w2):
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ w1) @ w2


def weights(count):
    return [leaf(8, 16) if k % 2 == 0 else leaf(16, 8) for k in range(2 * count)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_of_checkpoints_saves_what_passes_between_them(backend):
    def program(x, *ws):
        for w1, w2 in zip(ws[::2], ws[1::2], strict=True):
            x = checkpointed(block, x, w1, w2)
        return x

    graph = compiled_parts(program, lambda: (leaf(4, 8), *weights(3)), backend)
    assert saved_shapes(graph) == [(4, 8), (4, 8)]
    assert operators(graph)[aten.mm.default] == 3 * (4 + 1)  # of two products in a block, one is needed again


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_nested_checkpoints_the_outermost_decides(backend):
    def outer(x, w):
        return checkpointed(narrow, checkpointed(narrow, x, w), w).sin() @ w

    graph = compiled_parts(
        lambda x, w: checkpointed(outer, x.exp(), w) * 2, lambda: (leaf(4, 4), leaf(4, 4)), backend
    )
    assert saved_shapes(graph) == [(4, 4)]
    assert operators(graph)[aten.mm.default] == 3 * 2 + 2


def test_equal_operators_in_two_checkpoints_stay_two():
    def scaled(x, y, w):
        return (x.exp() @ w).sin() * y

    def program(x, y, w):
        return checkpointed(scaled, x, y, w) + checkpointed(scaled, x, y + 1, w)

    graph = compiled_parts(program, lambda: (leaf(4, 4), leaf(4, 4), leaf(4, 4)))
    assert operators(graph)[aten.exp.default] == operators(graph)[aten.cos.default] == 2
    assert operators(graph)[aten.mm.default] == 2 * 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_sequential(reentrant, backend):
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(6, 6), nn.Tanh())]
    model = nn.Sequential(*layers).double()

    def program(x):
        return checkpoint_sequential(model, 2, x, use_reentrant=reentrant)

    graph = compiled_parts(program, lambda: (leaf(3, 6),), backend)
    assert (3, 6) in saved_shapes(graph)
    plain = compiled_parts(lambda x: model(x), lambda: (leaf(3, 6),), backend)
    assert len(saved_shapes(graph)) < len(saved_shapes(plain))


def several_results(x, w):
    y, (same, z) = checkpointed(lambda a, *, scale: (a @ w * scale, (a, a.sin())), x, scale=3.0)
    return y, same, z * 2


def under_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpointed(narrow, x, w)
    return y.float() * 2


def autocast_inside(x, w):
    def body(a):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (a @ w).sin()

    return checkpointed(body, x) * 2


def switches(x, w):
    return checkpointed(
        narrow,
        x,
        w,
        determinism_check="none",
        debug=False,
        preserve_rng_state=False,
        context_fn=noop_context_fn,
    )


def views_leave(x, w):
    halves = checkpointed(lambda a: (a @ w).sin().chunk(2), x)
    return halves[0] * halves[1].exp()


def no_grad_inside(x, w):
    def body(a):
        with torch.no_grad():
            scale = (a @ w).amax()
        return (a @ w).sin() * scale

    return checkpointed(body, x) @ w


@pytest.mark.parametrize(
    ("program", "in_backward"),
    [(several_results, 2), (switches, 3), (views_leave, 3), (no_grad_inside, 5)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_products_are_computed_again(program, in_backward):
    graph = compiled_parts(program, lambda: (leaf(4, 4), leaf(4, 4)))
    assert operators(graph)[aten.mm.default] == in_backward


@pytest.mark.parametrize("program", [under_autocast, autocast_inside], ids=lambda program: program.__name__)
def test_products_are_computed_again_under_autocast(program):
    graph = compiled_parts(
        program, lambda: (leaf(4, 4, dtype=torch.float32), leaf(4, 4, dtype=torch.float32))
    )
    assert graph.backward is not None
    products = [node for node in graph.backward.graph.nodes if node.target is aten.mm.default]
    assert [node.meta["val"].dtype for node in products] == [torch.bfloat16] * 3


def test_random_numbers_that_the_recomputation_would_not_see_again_are_left_to_torch(caplog):
    def program(x):
        return checkpointed(lambda a: F.dropout(a.sin(), 0.5) * a, x, preserve_rng_state=False)

    compiled = gradsplit.compile(program, backend="aot_eager", fullgraph=True)
    compiled(leaf(3))
    assert "checkpoint-random" in caplog.text


# Policies.


def policy(**by_operator):
    def decide(context, operator, *args, **kwargs):
        assert isinstance(operator, torch._ops.OpOverload)
        name = operator.overloadpacket.__name__
        return by_operator.get(name, by_operator.get("others", CheckpointPolicy.PREFER_RECOMPUTE))

    return functools.partial(create_selective_checkpoint_contexts, decide)


def two_products(x, w):
    return (torch.relu(x @ w) @ w).sin()


def selected(context_fn, body=two_products, backend="aot_eager", size=4) -> PartitionedGraph:
    def program(x, w):
        return checkpointed(body, x * 1.5, w, context_fn=context_fn) * 3

    return compiled_parts(program, lambda: (leaf(size, size), leaf(size, size)), backend)


MUST_SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE, PREFER_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("context_fn", "again"),
    [
        (policy(), 2),
        (policy(mm=MUST_SAVE), 0),
        (policy(mm=PREFER_SAVE), 0),
        (policy(mm=MUST_RECOMPUTE, others=PREFER_SAVE), 1),  # what relu made of the first one is saved
        (policy(others=MUST_RECOMPUTE), 2),
        (policy(relu=MUST_SAVE), 1),
        (policy(mm=True), 0),
        (policy(mm=False), 2),
        (functools.partial(create_selective_checkpoint_contexts, [aten.mm.default]), 0),
        (functools.partial(create_selective_checkpoint_contexts, [aten.relu.default]), 1),
        (functools.partial(create_selective_checkpoint_contexts, []), 2),
    ],
)
def test_products_computed_again_under_a_policy(context_fn, again):
    graph = selected(context_fn)
    assert operators(graph)[aten.mm.default] == 4 + again


@pytest.mark.parametrize("backend", BACKENDS)
def test_must_save_holds_for_what_is_cheap(backend):
    def body(x, w):
        return (x.exp() * w).sin()

    cheap = selected(policy(exp=PREFER_SAVE), body, backend)
    saved = selected(policy(exp=MUST_SAVE), body, backend)
    assert operators(cheap)[aten.exp.default] == 1
    assert operators(saved)[aten.exp.default] == 0
    assert len(saved_shapes(saved)) > len(saved_shapes(cheap))


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_an_operator_that_is_decomposed_its_result_is_saved(backend):
    def body(x, w):
        return F.gelu(x @ w) @ w

    graph = selected(policy(gelu=MUST_SAVE), body, backend)
    # One for the input of gelu, which its own gradient needs; the second product reads what is saved.
    assert operators(graph)[aten.mm.default] == 4 + 1
    assert saved_shapes(graph) == [(4, 4)] * 2


def test_a_policy_with_a_context_of_its_own():
    """Every other product is saved, as is common in training recipes."""

    def contexts():
        count: defaultdict[bool, int] = defaultdict(int)

        def decide(context, operator, *args, **kwargs):
            if operator is not aten.mm.default:
                return PREFER_RECOMPUTE
            count[context.is_recompute] += 1  # some versions of torch ask again in the recomputation
            return MUST_SAVE if count[context.is_recompute] % 2 else MUST_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    def four_products(x, w):
        for _ in range(4):
            x = (x @ w).sin()
        return x

    assert operators(selected(contexts, four_products))[aten.mm.default] == 8 + 2


@pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters,
    reason="this version of torch does not tell a policy what an operator made",
)
def test_a_policy_may_look_at_what_an_operator_made():
    def decide(context, operator, *args, **kwargs):
        is_large = context.op_output.numel() > 10
        return MUST_SAVE if operator is aten.mm.default and is_large else PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    assert operators(selected(contexts, size=4))[aten.mm.default] == 4
    assert operators(selected(contexts, size=3))[aten.mm.default] == 4 + 2


def test_the_policy_of_an_outer_checkpoint_decides_for_the_inner_one():
    inner = policy(mm=MUST_SAVE)

    def outer(x, w):
        return checkpointed(two_products, x, w, context_fn=inner).sin() @ w

    assert operators(selected(policy(), outer))[aten.mm.default] == 6 + 2
    assert operators(selected(policy(mm=MUST_SAVE), outer))[aten.mm.default] == 6


def test_orders_hold_under_a_memory_budget():
    contexts = policy(mm=MUST_SAVE)

    def program(x, w):
        return checkpointed(two_products, x, w, context_fn=contexts) @ w

    counts = {}
    for budget in (0.0, 1.0):
        compiled = gradsplit.compile(
            program, backend="aot_eager", fullgraph=True, options={"activation_memory_budget": budget}
        )
        compiled(leaf(4, 4), leaf(4, 4))
        counts[budget] = operators(compiled.entries[0].compiled.partitioned)[aten.mm.default]
    assert counts == {0.0: 6, 1.0: 6}


class Recording:
    """A context that is no policy's."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


def other_contexts():
    return Recording(), Recording()


def test_other_contexts_are_left_to_torch(caplog):
    def program(x):
        return checkpointed(torch.sin, x, context_fn=other_contexts) * 2

    check_same(program, lambda: (leaf(3),), backend="aot_eager")
    assert "checkpoint-context" in caplog.text
