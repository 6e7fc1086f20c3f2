"""What a compiled call keeps: no more than it saves, no longer than anyone needs it, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core.backends.registry import RegionBackend, resolve_backend
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from tests.autograd.compare_with_eager import partitioned_graph
from tests.autograd.scenarios import BACKENDS, for_each, leaf


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Saved:
    """A saved tensor, as the autograd graph holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Watch:
    """Knows which of the tensors that were saved are alive."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Saved]] = []

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor.detach())  # a saved result would hold its own history
        self.references.append(weakref.ref(saved))
        return saved

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.references)


def deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).exp() @ w).sin()


def backward_with_the_result_alive(y, watch):
    loss = y.sum()
    loss.backward()
    assert watch.alive == 0


def backward_twice(y, watch):
    y.sum().backward(retain_graph=True)
    assert watch.alive > 0
    y.sum().backward()
    assert watch.alive == 0


def no_backward(y, watch):
    del y
    assert watch.alive == 0


def a_hook_that_raises(y, watch):
    def refuse(gradient):
        raise ValueError("no")

    handle = y.register_hook(refuse)
    with pytest.raises(ValueError):
        y.sum().backward()
    handle.remove()
    y.sum().backward()
    assert watch.alive == 0


ENDINGS = {
    ending.__name__: ending
    for ending in (backward_with_the_result_alive, backward_twice, no_backward, a_hook_that_raises)
}


def _run(compiled, ending, watch):
    x, w = leaf(3, 3), leaf(3, 3)
    with watch.saving():
        held = [compiled(x, w)]
    assert watch.alive > 0
    ending(held.pop(), watch)


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(ENDINGS, "ending")
def test_saved_tensors_are_freed(ending, backend):
    compiled = gradsplit.compile(deep, backend=backend, fullgraph=True)
    for _ in range(2):
        watch = Watch()
        _run(compiled, ending, watch)
        assert watch.alive == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_activations_go_with_their_results(backend):
    compiled = gradsplit.compile(deep, backend=backend, fullgraph=True)
    x, w = leaf(3, 3), leaf(3, 3)
    compiled(x, w).sum().backward()
    gc.collect()
    for differentiate in (True, False):
        hidden = x * 2
        y = compiled(hidden, w)
        references = weakref.ref(hidden), weakref.ref(y)
        if differentiate:
            y.sum().backward()
        del hidden, y
        assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recomputation_that_a_checkpoint_ends_keeps_nothing(backend):
    compiled = gradsplit.compile(deep, backend=backend, fullgraph=True)
    x, w = leaf(3, 3), leaf(3, 3)
    references: list[weakref.ref[torch.Tensor]] = []

    def checkpointed(x, w):
        hidden = x * 2
        references.append(weakref.ref(hidden))
        return compiled(hidden, w)

    for _ in range(2):
        checkpoint(checkpointed, x, w, use_reentrant=False).sum().backward()
    assert len(references) == 4 and not any(reference() is not None for reference in references)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_raises_keeps_nothing(backend):
    compiled = gradsplit.compile(lambda x, places: (x * 2)[places].sum(), backend=backend)
    x = leaf(3)
    compiled(x, torch.tensor([0, 1]))
    hidden = x * 2
    reference = weakref.ref(hidden)
    with pytest.raises(IndexError):
        compiled(hidden, torch.tensor([0, 7]))
    del hidden
    assert reference() is None


def test_double_backward_keeps_nothing_after_it():
    compiled = gradsplit.compile(deep, backend="aot_eager", options={"double_backward": True})
    x, w = leaf(3, 3), leaf(3, 3)
    compiled(x, w)
    watch = Watch()
    with watch.saving():
        y = compiled(x, w)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    g.sum().backward()
    del g
    y.sum().backward()
    assert watch.alive == 0


def _backward_inputs_alive_at_the_end(graph: PartitionedGraph) -> int:
    """Runs the backward with a probe in it, which counts what is alive where the last operation begins."""
    assert graph.backward is not None
    nodes = graph.backward.graph
    *_, last, _ = nodes.nodes
    counts: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []
    with nodes.inserting_before(last):
        nodes.call_function(lambda: counts.append(sum(r() is not None for r in references)), ())
    graph.backward.recompile()
    (compute,) = whole_schedule("backward", graph.backward).computes
    resolved = resolve_backend("aot_eager")
    assert isinstance(resolved, RegionBackend)
    region = resolved.compile_region(compute, CompileOptions(), StageDump(None, None))()
    arguments = [torch.zeros(node.meta["val"].shape) for node in nodes.find_nodes(op="placeholder")]
    references.extend(map(weakref.ref, arguments))
    region(arguments)
    return counts[0]


def test_interpreted_backward_frees_its_inputs_as_it_goes():
    def program(x, w):
        for _ in range(4):
            x = (x @ w).sin()
        return x

    graph = partitioned_graph(program, leaf(3, 3), leaf(3, 3))
    assert len(graph.saved) > 3
    assert _backward_inputs_alive_at_the_end(graph) <= 2
