"""What one run of a captured graph on fake tensors tells about how its results, inputs and gradients hang together.

The program runs without functionalization, where sharing is visible as shared storage and a change in place as
a version. A result that lies in the memory of an input, or of another result, is not computed by the graph: it
is made as a view of that tensor when the graph has run, so that a later change of one is seen in the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from gradsplit.compile_core.autograd.captured_graphs.overlapping_writes import RefuseOverlappingWrites
from gradsplit.compile_core.autograd.captured_graphs.preserved_modes import preserved_modes
from gradsplit.compile_core.autograd.captured_graphs.unnoticed_changes import unnoticed
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.graphs import Detachment, ResultAlias
from gradsplit.compile_core.ir.higher_order import HOOKED
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.autograd_engine import (
    is_made_with_gradients,
    is_view_as_leaf,
    tell_of_changes,
)
from gradsplit.compile_core.torch_facts.fake_tensors import run_on_fakes
from gradsplit.compile_core.torch_facts.wrapper_tensors import WrapperForm, inner_tensors


@dataclass(frozen=True)
class ResultOrBase:
    """Where a tensor that the graph computes is found: a result of the program, or what that result is a view of."""

    result: int
    is_base: bool

    def of(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        output = outputs[self.result]
        base = output._base if self.is_base else output
        assert base is not None
        return base


@dataclass(frozen=True)
class CallingConvention:
    """See ``GraphSignature``, which says the same of the finished graph.

    Attributes:
        results: the program's results: a position in ``picks``, or an alias.
        picks: the tensors that the graph computes for them.
        specs: their layouts.
        differentiable: whether gradients flow back into each of them.
        gradient_inputs: positions of the inputs that require gradients.
        rebound: positions of the inputs that the program changes in place under the eyes of autograd, so that
            they have a history of their own afterwards.
        counted: positions of the inputs whose versions tell of changes.
        unnoticed_inputs: positions of the inputs that plain PyTorch does not save -> the roots for which it does not, a
            bit set: results that are differentiable, and then ``rebound``.
        unnoticed_picks: the same of positions in ``picks``.
        spent: positions in ``picks`` of those whose history the program itself has used up: no backward comes through.
    """

    results: tuple[int | ResultAlias, ...]
    picks: tuple[ResultOrBase, ...]
    specs: tuple[TensorSpec, ...]
    differentiable: tuple[bool, ...]
    gradient_inputs: tuple[int, ...]
    rebound: tuple[int, ...]
    counted: frozenset[int]
    unnoticed_inputs: Mapping[int, int]
    unnoticed_picks: Mapping[int, int]
    spent: frozenset[int]


def find_calling_convention(
    module: torch.fx.GraphModule, examples: Sequence[Any], fake_mode: FakeTensorMode
) -> CallingConvention:
    """Runs ``module`` once on fresh fake tensors like ``examples``, and on the numbers among them.

    Raises:
        Unsupported: an input or a change of it that no functional graph can express.
    """
    for example in examples:
        if isinstance(example, torch.Tensor) and example.layout is not torch.strided:
            raise Unsupported(
                "layout", f"an input has layout {example.layout}", "only strided tensors are compiled"
            )
        if isinstance(example, torch.Tensor) and (example.is_neg() or example.is_conj()):
            raise Unsupported(
                "lazy-input",
                "an input's memory holds its negative or conjugate",
                "call resolve_neg() or resolve_conj() on it",
            )
    with preserved_modes(), run_on_fakes(fake_mode):
        with torch.enable_grad():
            inputs = [
                as_intermediate(example) if isinstance(example, torch.Tensor) else example
                for example in examples
            ]
        tensors = {k: given for k, given in enumerate(inputs) if isinstance(given, torch.Tensor)}
        before = {
            k: (_metadata(tensor), tensor.requires_grad, tensor.grad_fn) for k, tensor in tensors.items()
        }
        versions = {k: tensor._version for k, tensor in tensors.items() if not tensor.is_inference()}
        with failures_explained(), RefuseOverlappingWrites():
            outputs = module.forward(*inputs)
        rebound: list[int] = []
        for position, (metadata, _, history) in before.items():
            tensor = tensors[position]
            if _metadata(tensor) != metadata:
                raise Unsupported(
                    "metadata-mutation", "the program changes the shape or strides of an input in place"
                )
            if tensor.grad_fn is not history:
                rebound.append(position)
        _check_views(outputs)
        required = [requires_grad for _, requires_grad, _ in before.values()]
        _check_leaves(outputs, list(tensors.values()), required, rebound)
        results, picks = _find_results(outputs, tensors)
        picked = [pick.of(outputs) for pick in picks]
        asks = any(node.target is torch.autograd.grad for node in module.graph.nodes)
        spent = frozenset(k for k, tensor in enumerate(picked) if asks and _is_spent(tensor))
        differentiable = tuple(tensor.requires_grad and k not in spent for k, tensor in enumerate(picked))
        roots = [*itertools.compress(picked, differentiable), *map(tensors.__getitem__, rebound)]
        unnoticed_inputs, unnoticed_picks = unnoticed(roots, tensors, dict(enumerate(picked)))
        convention = CallingConvention(
            results=results,
            picks=picks,
            specs=tuple(TensorSpec.of(tensor) for tensor in picked),
            differentiable=differentiable,
            gradient_inputs=tuple(k for k, (_, requires_grad, _) in before.items() if requires_grad),
            rebound=tuple(rebound),
            counted=frozenset(tensors)
            - {k for k, version in versions.items() if tensors[k]._version == version},
            unnoticed_inputs=unnoticed_inputs,
            unnoticed_picks=unnoticed_picks,
            spent=spent,
        )
        return replace(convention, results=_with_counts(results, outputs, tensors, picked))


def _is_spent(result: torch.Tensor) -> bool:
    """Whether a backward through a result raises, as the program has made one before that kept nothing of the graph."""
    if result.grad_fn is None:
        return False
    try:
        torch.autograd.backward(result, torch.ones_like(result), retain_graph=True)
    except Exception as error:
        # Any other is the trace's to tell: forms of torch's divide by the number of elements.
        return "second time" in str(error)
    return False


def _check_views(outputs: Sequence[torch.Tensor]) -> None:
    """Refuses views that autograd does not let a program use, since their base was changed: it may be without them."""
    try:
        for output in outputs:
            _ = output.grad_fn
    except RuntimeError as error:
        raise Unsupported("stale-view", f"a result that autograd forbids to use: {error}") from error


def _check_leaves(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    required: Sequence[bool],
    rebound: Sequence[int],
) -> None:
    """Refuses a program that returns leaves of its own making: gradients accumulate in them.

    A view that was made without gradients, of an input that requires them, is such a leaf, too; but where the caller
    has none at all, it is one again when it is made after the graph ran.
    """
    new = [output for output in outputs if not any(output is tensor for tensor in inputs)]
    leaves = [output for output in new if output.requires_grad and output.is_leaf]
    is_differentiable = bool(rebound) or any(output.grad_fn is not None for output in new)
    if not torch.is_grad_enabled() and not is_differentiable:
        given = [_root(tensor) for tensor in inputs if _root(tensor).requires_grad]
        leaves = [leaf for leaf in leaves if not any(_root(leaf) is root for root in given)]
    turned = any(
        tensor.grad_fn is None and tensor.requires_grad != before
        for tensor, before in zip(inputs, required, strict=True)
    )
    if leaves or turned or (is_differentiable and not any(required)):
        raise Unsupported("new-leaf", "the program makes a tensor that gathers gradients of its own")


def _find_results(
    outputs: Sequence[torch.Tensor], inputs: Mapping[int, torch.Tensor]
) -> tuple[tuple[int | ResultAlias, ...], tuple[ResultOrBase, ...]]:
    positions = {tensor.untyped_storage()._cdata: k for k, tensor in inputs.items()}
    groups: dict[int, list[int]] = {}
    for k, output in enumerate(outputs):
        groups.setdefault(output.untyped_storage()._cdata, []).append(k)

    results: dict[int, int | ResultAlias] = {}
    picks: list[ResultOrBase] = []
    detachments: dict[int, Detachment] = {}
    # Torch fails an assertion where another result of a node than its first retains its gradient and is changed.
    for members in sorted(
        groups.values(), key=lambda group: not any(outputs[k].requires_grad for k in group)
    ):
        position = positions.get(outputs[members[0]].untyped_storage()._cdata)
        if position is not None:
            for k in members:
                results[k] = _alias("input", position, outputs[k], inputs[position], detachments)
            continue
        pick = _choose_owner(outputs, members)
        owner = pick.of(outputs)
        for k in members:
            is_owner = outputs[k] is owner
            results[k] = (
                len(picks) if is_owner else _alias("output", len(picks), outputs[k], owner, detachments)
            )
        picks.append(pick)
    return tuple(results[k] for k in range(len(outputs))), tuple(picks)


def _choose_owner(outputs: Sequence[torch.Tensor], members: Sequence[int]) -> ResultOrBase:
    """The tensor that all results in one memory can be made from: the only one, or one that fills the memory."""
    if all(outputs[k] is outputs[members[0]] for k in members):
        return ResultOrBase(members[0], False)
    candidates = [ResultOrBase(k, False) for k in members]
    candidates += [ResultOrBase(k, True) for k in members if outputs[k]._base is not None]
    filling = [pick for pick in candidates if _fills_memory(pick.of(outputs))]
    if not filling:
        raise Unsupported(
            "results-share-storage", "two results of the program share memory that neither fills"
        )
    # A result that was cut off from autograd can be made from the one that was not, but not the other way round; and a
    # view from what it is a view of, through which its gradient goes. Of two views of what nobody holds, the program
    # may have one require gradients, which the other must not see.
    with_gradients = [pick for pick in filling if pick.of(outputs).requires_grad]
    if with_gradients:
        return min(with_gradients, key=lambda pick: (pick.is_base, pick.of(outputs)._is_view()))
    return min(filling, key=lambda pick: pick.of(outputs)._is_view())


def _fills_memory(tensor: torch.Tensor) -> bool:
    spec = TensorSpec.of(tensor)
    needed = tensor.numel() * tensor.dtype.itemsize
    return spec.is_dense and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == needed


def _alias(
    kind: str,
    position: int,
    output: torch.Tensor,
    source: torch.Tensor,
    detachments: dict[int, Detachment],
) -> ResultAlias:
    if (
        output.dtype != source.dtype
        or output.is_conj() != source.is_conj()
        or output.is_neg() != source.is_neg()
    ):
        raise Unsupported("reinterpreting-view", f"a result is a view of an {kind} with another dtype")
    if output.requires_grad and not _has_history_of(output, source):
        raise Unsupported(
            "results-share-storage", f"a result in memory of an {kind} has a history of its own in autograd"
        )
    if output.requires_grad and _is_hooked(output, source):
        raise Unsupported("hooked-view", f"a result is a view of an {kind}, with a hook for its gradient")
    detached = None
    if not output.requires_grad and (source.requires_grad or _root(output) is not _root(source)):
        detached = detachments.setdefault(id(_root(output)), Detachment(len(detachments), True))
    # Of a view that an ``autograd.Function`` gives without gradients, autograd notes the function instead of that.
    is_bare_view = output._is_view() and not output.requires_grad
    with_gradients = is_made_with_gradients(output) if is_bare_view else output.grad_fn is not None
    is_detached_itself = detached is not None and output._base is None and _layout(output) == _layout(source)
    if output is source or is_detached_itself:
        return ResultAlias(kind == "input", position, None, detached, with_gradients)
    offset: Any = output.storage_offset() - source.storage_offset()
    view = (tuple(output.shape), tuple(output.stride()), offset)
    is_ambiguous = output.requires_grad and (
        TensorSpec.of(source).may_overlap or (_root(output) is source and _goes_by_strides(output))
    )
    if is_ambiguous and (output._has_symbolic_sizes_strides or source._has_symbolic_sizes_strides):
        raise Unsupported("view-of-expanded", "a result is a view of an expanded input of open sizes")
    fake = output if is_ambiguous else None
    return ResultAlias(kind == "input", position, view, detached, with_gradients, fake)


def _with_counts(
    results: Sequence[int | ResultAlias],
    outputs: Sequence[torch.Tensor],
    inputs: Mapping[int, torch.Tensor],
    picked: Sequence[torch.Tensor],
) -> tuple[int | ResultAlias, ...]:
    """The results with what a change of each shows of detachments, after which the run is of no further use."""
    counted: dict[Detachment, bool] = {}
    for result, output in zip(results, outputs, strict=True):
        if isinstance(result, int) or result.detached is None or output.is_inference():
            continue
        source = (inputs if result.of_input else picked)[result.position]
        before = source._version
        tell_of_changes([output])
        counted[result.detached] = source._version != before
    return tuple(
        replace(result, detached=replace(result.detached, is_counted=counted[result.detached]))
        if isinstance(result, ResultAlias) and result.detached in counted
        else result
        for result in results
    )


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """What a change in place gives a new history to: the tensor, or what autograd knows it for a view of."""
    return tensor if tensor._base is None else tensor._base


def _has_history_of(output: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether autograd knows the two for views of one tensor, so that a view made later is differentiated alike."""
    root = _root(output)
    if root is not _root(source):
        return False
    if output.grad_fn is None:
        return True
    return _leads_by_views(output, source) or (
        _leads_by_views(output, root) and _leads_by_views(source, root)
    )


def _leads_by_views(tensor: torch.Tensor, origin: torch.Tensor) -> bool:
    """Whether the history of a tensor goes through views alone to that of one with the same memory.

    It does not where a backward of the program's own lies between, or a view that was made without gradients.
    """
    if not origin.requires_grad:
        return False
    end, start = get_gradient_edge(origin), get_gradient_edge(tensor)
    node: Any = start.node
    position = start.output_nr
    while (node, position) != (end.node, end.output_nr):
        sources = [source for source in node.next_functions if source[0] is not None]
        if isinstance(node, BackwardCFunction) or len(sources) != 1:
            return False
        ((node, position),) = sources
    return True


def _goes_by_strides(view: torch.Tensor) -> bool:
    """Whether a view was made by ``as_strided``, which has no gradient where it leaves what it is a view of."""
    node: Any = view.grad_fn
    while node is not None and not isinstance(node, BackwardCFunction):
        if node.name() == "AsStridedBackward0":
            return True
        sources = [source for source, _ in node.next_functions if source is not None]
        node = sources[0] if len(sources) == 1 else None
    return False


def _is_hooked(view: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the gradient of a view goes through a hook on its way to the source: a view made later has none."""
    node: Any = view.grad_fn
    while node is not None and node is not source.grad_fn:
        if node.metadata.get(HOOKED):
            return True
        sources = [source for source, _ in node.next_functions if source is not None]
        node = sources[0] if len(sources) == 1 else None
    return False


def as_leaf(example: torch.Tensor) -> torch.Tensor:
    """A fresh fake leaf: the trace must not grow the autograd graph of the capture's own fake tensors."""
    form = WrapperForm.of(example)
    if form is not None:
        return form.build([as_leaf(part) for part in inner_tensors(example)]).requires_grad_(
            example.requires_grad
        )
    leaf = TensorSpec.of(example).empty()
    if is_view_as_leaf(example):
        leaf = leaf.view_as(leaf)
    return leaf.requires_grad_(example.requires_grad)


def as_intermediate(example: torch.Tensor) -> torch.Tensor:
    """Like a leaf, but in-place operators do not refuse it: the real input may be an activation."""
    leaf = as_leaf(example)
    may_be_no_leaf = leaf.requires_grad and not leaf._is_view()
    return leaf.clone() if may_be_no_leaf and TensorSpec.of(leaf).is_dense else leaf


def _metadata(tensor: torch.Tensor) -> tuple[object, ...]:
    return (*_layout(tensor), tensor.untyped_storage()._cdata)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def dense_spec(spec: TensorSpec) -> TensorSpec:
    """The layout itself where it is dense, else row-major: an expanded tensor has no room."""
    return spec if spec.is_dense else TensorSpec.contiguous(spec.shape, spec.dtype, spec.device)


@contextmanager
def failures_explained() -> Iterator[None]:
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        # Also what torch's own tracing asserts, of operators with effects for one.
        raise Unsupported(
            "trace-failed", f"the captured graph does not run on fake tensors: {error}"
        ) from error
