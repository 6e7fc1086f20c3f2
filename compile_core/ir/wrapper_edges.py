"""Wrappers at the edges of a graph that computes with their inner tensors: taken apart, put together, both under the
eyes of autograd, whose graph outside of the compiled one is that of the wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.torch_facts.wrapper_tensors import (
    WrapperForm,
    inner_tensors,
    is_in_flight,
    is_wrapper,
)

Gradients = Sequence[torch.Tensor | None]


class _TakeApart(torch.autograd.Function):
    """The tensors that hold a wrapper's data."""

    @staticmethod
    def forward(ctx: Any, form_of_gradient: Callable[[], WrapperForm], tensor: torch.Tensor) -> Any:
        # Those that take no gradients stay the very tensors: by that nested tensors tell sizes.
        ctx.form_of_gradient = form_of_gradient
        ctx.form = form = WrapperForm.of(tensor)
        assert form is not None
        ctx.others = {}
        inner = []
        for part, (path, takes) in zip(inner_tensors(tensor), form.leaves, strict=True):
            inner.append(part.detach() if takes else part)
            if not takes:
                ctx.others[path] = part
        ctx.mark_non_differentiable(*ctx.others.values())
        return tuple(inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        form = ctx.form_of_gradient()
        found = iter([each for each, takes in zip(gradients, ctx.form.takes, strict=True) if takes])
        return None, form.build([next(found) if takes else ctx.others[path] for path, takes in form.leaves])


class _PutTogether(torch.autograd.Function):
    """A wrapper of the tensors that hold its data."""

    @staticmethod
    def forward(
        ctx: Any, form: WrapperForm, inner_of_gradient: Callable[[Any], Gradients], *inner: torch.Tensor
    ) -> Any:
        ctx.inner_of_gradient = inner_of_gradient
        ctx.set_materialize_grads(False)
        ctx.count = len(inner)
        return form.build(
            [part.detach() if takes else part for part, takes in zip(inner, form.takes, strict=True)]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        found = [None] * ctx.count if gradient is None else ctx.inner_of_gradient(gradient)
        return None, None, *found


def has_wrappers(module: GraphModule) -> bool:
    """Whether a value of a captured graph is a wrapper."""
    return any(
        is_wrapper(leaf)
        for node in module.graph.nodes
        for leaf in tree_leaves(node.meta.get("example_value"))
    )


def call_of_class(cls: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a class of wrappers makes of tensors, as a node of a captured graph: a function of it, or it itself."""
    return cls(*args, **kwargs) if name == "__call__" else getattr(cls, name)(*args, **kwargs)


def take_apart(tensor: torch.Tensor, form_of_gradient: Callable[[], WrapperForm]) -> Sequence[torch.Tensor]:
    """The tensors that hold a wrapper's data. Their gradients are those of a gradient of ``form_of_gradient()``."""
    return _TakeApart.apply(form_of_gradient, tensor) if tensor.requires_grad else inner_tensors(tensor)


def put_together(
    form: WrapperForm, inner: Sequence[torch.Tensor], inner_of_gradient: Callable[[Any], Gradients]
) -> torch.Tensor:
    """A wrapper of ``form``. ``inner_of_gradient`` gives the gradients of ``inner`` for one of the wrapper."""
    if any(part.requires_grad for part in inner):
        return _PutTogether.apply(form, inner_of_gradient, *inner)
    return form.build(inner)


@dataclass(frozen=True)
class WrapperEdges:
    """How the inputs and results of a graph hang together with those of one that computes with inner tensors.

    Attributes:
        inputs: for each input its form, ``None`` for what is no wrapper.
        gradients: the forms that their gradients have, which the trace of the graph finds.
        results: for each result its form.
        tangents: the forms of gradients that arrive for them.
        changed: the inputs that the graph changes in place.
        passed: for each result, its inner tensors that take no gradients and are inner tensors of an input, by position
            among its own, and where they lie among those of all inputs: no results of the graph of inner tensors.
        repeated: among what the inputs are taken apart to, the tensors that came before: no inputs of that graph.
    """

    inputs: tuple[WrapperForm | None, ...]
    gradients: dict[int, WrapperForm]
    results: tuple[WrapperForm | None, ...]
    tangents: tuple[WrapperForm | None, ...]
    changed: tuple[int, ...]
    passed: tuple[dict[int, int], ...]
    repeated: frozenset[int]

    @functools.cached_property
    def wrapping(self) -> tuple[int, ...]:
        """The inputs that are wrappers."""
        return tuple(k for k, form in enumerate(self.inputs) if form is not None)

    def around(self, run: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
        """``run``, which takes and gives inner tensors, as a function of the wrappers."""

        def call(*inputs: Any) -> tuple[torch.Tensor, ...]:
            given = [inner for position in self.wrapping for inner in inner_tensors(inputs[position])]
            found = iter(run(*self.parts(inputs)))
            results = []
            for form, tangent, passed in zip(self.results, self.tangents, self.passed, strict=True):
                if form is None:
                    results.append(next(found))
                    continue
                assert tangent is not None
                inner = [given[passed[k]] if k in passed else next(found) for k in range(len(form.leaves))]
                results.append(put_together(form, inner, _Arrival(form, tangent)))
            for position in self.changed:
                if not inputs[position].is_inference():
                    torch.autograd.graph.increment_version(inputs[position])
            return tuple(results)

        return call

    def parts(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of the graph that computes with inner tensors."""
        found: list[Any] = []
        for position, (form, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if form is None:
                found.append(given)
            else:
                found += take_apart(given, lambda position=position: self.gradients[position])
        return [part for k, part in enumerate(found) if k not in self.repeated] if self.repeated else found


@dataclass(frozen=True)
class _Arrival:
    """Takes a gradient apart that arrives for a wrapper, as the compiled backward expects it."""

    result: WrapperForm
    form: WrapperForm

    def __call__(self, gradient: Any) -> Gradients:
        form = self.form
        if any(map(is_in_flight, inner_tensors(gradient))):
            gradient = gradient.detach().clone()
        if not form.fits(gradient):
            adapt = getattr(gradient, "__coerce_same_metadata_as_tangent__", None)
            gradient = gradient if adapt is None else adapt(form.parts.context, form.cls)
        if gradient is None or not form.fits(gradient):
            name = type(gradient).__qualname__
            raise RuntimeError(
                f"a gradient of {name} arrives for a {form.cls.__qualname__} in another form than the backward "
                f"was compiled for ({form.parts.context}): give the result's own, or keep what makes it out of the "
                "compiled function by gradsplit.disable"
            )
        parts = zip(inner_tensors(gradient), form.takes, strict=True)
        arrived = iter([part for part, takes in parts if takes])
        return [next(arrived) if takes else None for takes in self.result.takes]
