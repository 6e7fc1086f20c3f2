"""Traces a captured graph forward and backward into one functional ATen graph.

The idea is AOTAutograd's: run the captured program once on fake tensors with autograd on, ask autograd for
the gradients, and record every operator below autograd. Three dispatch modes are stacked: functionalization
on top turns mutation and views into pure operators, the proxy mode below it records (and decomposes), fake
tensors compute shapes.

Limits, each an ``Unsupported`` (the caller then runs the captured graph with torch's own kernels): an input
that requires gradients, or comes to, is changed in place; so is one that shares memory with another input; an
input's metadata is changed; results that share memory with one another; tensor subclasses, sparse or
quantised layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compile_core.autograd import random_order
from compile_core.autograd.preserved_modes import preserved_modes, without_autocast
from compile_core.autograd.separate_results import separate_results
from compile_core.autograd.simplify import simplify
from compile_core.errors import Unsupported
from compile_core.ir.graphs import GraphSignature, InputAlias, JointGraph
from compile_core.ir.tensor_spec import TensorSpec

# torch exports these without declaring them.
functionalize_has_data_mutation: Any = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
sync: Any = torch._sync  # type: ignore[attr-defined]
from_functional_tensor: Any = torch._from_functional_tensor  # type: ignore[attr-defined]

Decompositions = Mapping[Any, Callable[..., Any]]


def trace_joint(
    module: torch.fx.GraphModule, examples: Sequence[torch.Tensor], decompositions: Decompositions
) -> JointGraph:
    """The joint graph of ``module`` at the shapes of ``examples``, in the grad mode of the caller.

    Args:
        module: a captured graph: one placeholder per tensor, a flat tuple of tensors out.
        examples: fake tensors, with the ``requires_grad`` of the real inputs.
        decompositions: operator -> function that expresses it in simpler ones.

    Returns:
        A ``JointGraph`` whose nodes carry their fake result in ``meta["val"]``. Without gradients to compute
        it has no tangents and is an inference graph.

    Raises:
        Unsupported: one of the limits above.
    """
    fake_mode = _fake_mode_of(examples)
    plan = _probe(module, examples, fake_mode)
    trainable = bool(plan.tangents) and bool(plan.gradient_inputs)
    with fake_mode:
        seeds = [_empty(spec) for spec in plan.tangent_specs] if trainable else []
        leaves = [_as_leaf(example) for example in examples]

    mutated: list[int] = []

    def joint(*inputs: torch.Tensor) -> list[torch.Tensor | None]:
        with FunctionalTensorMode():
            wrapped = [FunctionalTensor.to_functional(primal) for primal in inputs[: len(examples)]]
            outputs = [out for out, keep in zip(module.forward(*wrapped), plan.kept, strict=True) if keep]
            gradients: Sequence[torch.Tensor | None] = ()
            if trainable:
                wrapped_seeds = [FunctionalTensor.to_functional(seed) for seed in inputs[len(examples) :]]
                with without_autocast():
                    gradients = torch.autograd.grad(
                        [outputs[position] for position in plan.tangents],
                        [wrapped[position] for position in plan.gradient_inputs],
                        wrapped_seeds,
                        allow_unused=True,
                    )
            mutated.extend(
                k for k, tensor in enumerate(wrapped) if functionalize_has_data_mutation(tensor.elem)
            )
            updated = [wrapped[position] for position in mutated]
            return [_unwrap(value) for value in (*outputs, *updated, *gradients)]

    with preserved_modes(), fake_mode, _failures_explained():
        traced = make_fx(
            joint,
            decomposition_table={**random_order.DECOMPOSITIONS, **decompositions},
            tracing_mode="real",
            _allow_non_fake_inputs=True,
            record_stack_traces=False,
        )(*leaves, *seeds)
    _check_overlap(examples, mutated)

    placeholders = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    num_results = sum(plan.kept)
    signature = GraphSignature(
        results=plan.results,
        mutated=tuple((position, num_results + k) for k, position in enumerate(mutated)),
        differentiable=plan.differentiable,
        gradient_inputs=plan.gradient_inputs if trainable else (),
        tangents=plan.tangents if trainable else (),
        tangent_specs=plan.tangent_specs if trainable else (),
    )
    num_outputs = num_results + len(mutated)
    tangents = tuple(placeholders[len(examples) :])
    return JointGraph(
        module=separate_results(simplify(traced), num_outputs, set(tangents)),
        primals=tuple(placeholders[: len(examples)]),
        tangents=tangents,
        num_outputs=num_outputs,
        signature=signature,
    )


@dataclass(frozen=True)
class _Probe:
    """What one run of the program on fake tensors tells about its calling convention."""

    results: tuple[int | InputAlias, ...]
    kept: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    tangents: tuple[int, ...]
    tangent_specs: tuple[TensorSpec, ...]
    gradient_inputs: tuple[int, ...]


def _probe(
    module: torch.fx.GraphModule, examples: Sequence[torch.Tensor], fake_mode: FakeTensorMode
) -> _Probe:
    """Runs the program without functionalization, where aliasing is visible as shared storage."""
    for example in examples:
        if example.layout is not torch.strided:
            raise Unsupported(
                "layout", f"an input has layout {example.layout}", "only strided tensors are compiled"
            )
    with preserved_modes(), fake_mode:
        inputs = [_as_intermediate(example) for example in examples]
        before = [_metadata(tensor) for tensor in inputs]
        versions = [tensor._version for tensor in inputs]
        storages = {tensor.untyped_storage()._cdata: position for position, tensor in enumerate(inputs)}
        with _failures_explained():
            outputs = module.forward(*inputs)
        for position, tensor in enumerate(inputs):
            if _metadata(tensor) != before[position]:
                raise Unsupported(
                    "metadata-mutation", "the program changes the shape or strides of an input in place"
                )
            if tensor._version != versions[position] and tensor.requires_grad:
                raise Unsupported(
                    "mutated-input-requires-grad",
                    f"input {position} is changed in place and takes part in autograd",
                    "write the out-of-place form, or compile the part that follows the mutation",
                )

        results: list[int | InputAlias] = []
        kept: list[bool] = []
        fresh: dict[int, int] = {}
        graph_outputs: list[torch.Tensor] = []
        for output in outputs:
            storage = output.untyped_storage()._cdata
            alias = storages.get(storage)
            if alias is not None:
                results.append(_alias(output, inputs[alias], alias))
                kept.append(False)
                continue
            known = fresh.setdefault(storage, len(graph_outputs))
            results.append(known)
            if known < len(graph_outputs):
                if graph_outputs[known] is not output:
                    raise Unsupported("results-share-storage", "two results of the program share memory")
                kept.append(False)
                continue
            kept.append(True)
            graph_outputs.append(output)
        tangents = tuple(k for k, output in enumerate(graph_outputs) if output.requires_grad)
        return _Probe(
            results=tuple(results),
            kept=tuple(kept),
            differentiable=tuple(output.requires_grad for output in graph_outputs),
            tangents=tangents,
            tangent_specs=tuple(_dense_spec(graph_outputs[k]) for k in tangents),
            gradient_inputs=tuple(k for k, tensor in enumerate(inputs) if tensor.requires_grad),
        )


def _alias(output: torch.Tensor, source: torch.Tensor, position: int) -> InputAlias:
    if (
        output.dtype != source.dtype
        or output.is_conj() != source.is_conj()
        or output.is_neg() != source.is_neg()
    ):
        raise Unsupported("reinterpreting-view", "a result is a view of an input with another dtype")
    detached = source.requires_grad and not output.requires_grad
    if output is source:
        return InputAlias(position, None, detached)
    offset = int(output.storage_offset() - source.storage_offset())
    return InputAlias(position, (tuple(output.shape), tuple(output.stride()), offset), detached)


def _fake_mode_of(examples: Sequence[torch.Tensor]) -> FakeTensorMode:
    for example in examples:
        if isinstance(example, FakeTensor):
            return example.fake_mode
    return FakeTensorMode()


def _as_leaf(example: torch.Tensor) -> torch.Tensor:
    """A fresh fake leaf: the trace must not grow the autograd graph of the capture's own fake tensors."""
    return _empty(TensorSpec.of(example)).requires_grad_(example.requires_grad)


def _as_intermediate(example: torch.Tensor) -> torch.Tensor:
    """Like a leaf, but in-place operators do not refuse it: the real input may be an activation."""
    leaf = _as_leaf(example)
    return leaf.clone() if leaf.requires_grad and TensorSpec.of(leaf).is_dense else leaf


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
    return (*layout, tensor.untyped_storage()._cdata)


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


def _dense_spec(output: torch.Tensor) -> TensorSpec:
    """The output's own layout where it is dense, else row-major: an expanded one has no room."""
    spec = TensorSpec.of(output)
    return spec if spec.is_dense else TensorSpec.contiguous(spec.shape, spec.dtype, spec.device)


def _unwrap(value: torch.Tensor | None) -> torch.Tensor | None:
    if not isinstance(value, FunctionalTensor):
        return value
    sync(value)
    return from_functional_tensor(value.elem)


@contextmanager
def _failures_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Unsupported(
            "trace-failed", f"the captured graph does not run on fake tensors: {error}"
        ) from error


def _check_overlap(examples: Sequence[torch.Tensor], mutated: Sequence[int]) -> None:
    """The functional graph knows its inputs as separate tensors: a change of one does not reach another."""
    owners = Counter(example.untyped_storage()._cdata for example in examples)
    for position in mutated:
        if owners[examples[position].untyped_storage()._cdata] > 1:
            raise Unsupported(
                "overlapping-inputs",
                f"input {position} is changed in place and shares its memory with another input",
            )
