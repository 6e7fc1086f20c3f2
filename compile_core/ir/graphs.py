"""Functional ATen graphs: forward and backward together, and then apart.

Both types carry one ``GraphSignature``: what a caller of the compiled graph has to do round it, which does not change
when the graph is partitioned or scheduled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gradsplit.compile_core.ir.tensor_spec import TensorSpec


@dataclass(frozen=True)
class OpenSize:
    """A size, stride or offset known only at run time: its position among the sizes that the forward returns."""

    position: int


def resolve_sizes(sizes: Sequence[int | OpenSize], run: Sequence[int]) -> tuple[int, ...]:
    """Sizes with those of a run, which its forward returned, in the place of open ones."""
    return tuple(run[size.position] if isinstance(size, OpenSize) else size for size in sizes)


def resolve_spec(spec: TensorSpec, run: Sequence[int]) -> TensorSpec:
    """``resolve_sizes`` for the sizes and strides of a tensor."""
    if not run:
        return spec
    return replace(spec, shape=resolve_sizes(spec.shape, run), stride=resolve_sizes(spec.stride, run))


@dataclass(frozen=True)
class Detachment:
    """How a program has cut results off from autograd: results of equal detachments of one tensor are views of one
    detached tensor, so that a change of one, in autograd's eyes, is one of all.

    Attributes:
        number: distinguishes detachments of a graph.
        is_counted: whether changes of the detached tensor count as changes of what it was detached from; ``.data`` has
            a count of its own.
    """

    number: int
    is_counted: bool


@dataclass(frozen=True)
class ResultAlias:
    """A result that lies in the memory of another tensor; it is made at run time, outside the graph.

    Attributes:
        of_input: whether that tensor is an input, else one of the graph's own outputs.
        position: among the primals, or among the outputs.
        view: sizes, strides and offset relative to that tensor's own offset, or ``None`` for the tensor itself.
        detached: how the program cut it off from autograd, if it did.
        with_gradients: whether it is a view that was made where gradients were on, or has a history.
        fake: the result of the trace, a view whose operations are done again where several elements of that tensor lie
            in one place: sizes and strides do not tell then which of them are whose.
    """

    of_input: bool
    position: int
    view: tuple[tuple[int | OpenSize, ...], tuple[int | OpenSize, ...], int | OpenSize] | None
    detached: Detachment | None
    with_gradients: bool
    fake: torch.Tensor | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Mutation:
    """An input that the program changes in place.

    Attributes:
        input: position among the primals.
        output: position among the graph's outputs of its new value.
        differentiable: autograd saw the change, so gradients flow from the input's later uses into the graph.
        counted: the tensor's version counts the change; it does not count one through ``.data``, nor does a batch norm
            count those of its running statistics.
    """

    input: int
    output: int
    differentiable: bool
    counted: bool = True


@dataclass(frozen=True)
class GraphSignature:
    """The calling convention of a traced graph.

    Attributes:
        results: the captured graph's results in order: a position among the graph's own outputs, or an alias.
        mutated: the inputs that the program changes, in the order in which the changes are made after the graph ran.
        gradient_inputs: positions of the primals that require gradients.
        tangents: positions among the graph's outputs of those for which the backward takes a gradient.
        tangent_specs: the layout in which the backward expects each of them; sizes and strides may be ``OpenSize``.
        gradient_tangents: for each gradient, what it depends on: a bit set of positions among the tangents and, above
            them, of those to which it is enough that autograd's engine comes, with nothing. Where none of these
            arrives, the gradient is ``None`` as in eager, not zeros. Of what is left undefined, the tangents that lead
            to the input.
        tangent_groups: for each tangent, those that some operation of the plain program's backward, which reads what
            the forward saved, takes with it, by way of others, too: a bit set. A backward through one group frees what
            it reads, and not what others do.
        open_sizes: how many of the graph's last outputs are numbers, for whoever meets an ``OpenSize``.
        left_undefined: positions among the gradients of those that are ``None`` since a function of the program's says
            so, and not since nothing leads to the input: autograd's engine comes to the input with nothing.
        presence: the backward takes a flag after the tangents for each of these: whether any of them arrives, a bit
            set as above.
        spent: positions among the graph's outputs of results whose history the program's own backward has used up.
    """

    results: tuple[int | ResultAlias, ...]
    mutated: tuple[Mutation, ...]
    gradient_inputs: tuple[int, ...]
    tangents: tuple[int, ...]
    tangent_specs: tuple[TensorSpec, ...]
    gradient_tangents: tuple[int, ...]
    tangent_groups: tuple[int, ...]
    open_sizes: int = 0
    left_undefined: tuple[int, ...] = ()
    presence: tuple[int, ...] = ()
    spent: tuple[int, ...] = ()


def replaced_inputs(signature: GraphSignature) -> dict[int, int]:
    """Of the graph's outputs those that are new values of inputs and nothing else, with the inputs' positions.

    Not so where gradients flow through the change, which needs to be an operation of its own then.
    """
    needed = {
        result if isinstance(result, int) else result.position
        for result in signature.results
        if isinstance(result, int) or not result.of_input
    }
    outputs = Counter(mutation.output for mutation in signature.mutated)
    return {
        mutation.output: mutation.input
        for mutation in signature.mutated
        if not mutation.differentiable and mutation.output not in needed and outputs[mutation.output] == 1
    }


@dataclass(frozen=True)
class FoldedValues:
    """What a graph would compute of its parameters alone in each call, as a graph of its own.

    Attributes:
        module: takes some primals and returns a flat tuple of tensors.
        inputs: the positions of those primals.
    """

    module: torch.fx.GraphModule
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one functional graph.

    Attributes:
        module: placeholders are the primals, tensors and numbers, then the tangents. The output node is a flat tuple:
            the graph's outputs, then one gradient (or ``None``) for each of ``signature.gradient_inputs``.
        primals: names of the primal placeholders.
        tangents: names of the tangent placeholders, and then of the flags for ``signature.presence``; empty for an
            inference graph.
        num_outputs: how many of the outputs belong to the forward.
        unnoticed_inputs: positions of the primals in whose memory no operation of plain PyTorch saves anything for some
            tangents, so that it does not notice when they are changed before these arrive -> those tangents, a bit set.
        unnoticed_outputs: the same of outputs of the graph.
        folded: what is computed apart from the calls; its values are the last primals.
    """

    module: torch.fx.GraphModule
    primals: tuple[str, ...]
    tangents: tuple[str, ...]
    num_outputs: int
    signature: GraphSignature
    unnoticed_inputs: Mapping[int, int] = field(default_factory=dict)
    unnoticed_outputs: Mapping[int, int] = field(default_factory=dict)
    folded: FoldedValues | None = None


@dataclass(frozen=True)
class PartitionedGraph:
    """The joint graph cut into two programs.

    Attributes:
        forward: placeholders are the primals; outputs are the graph's outputs, then the saved values
            that are not primals.
        backward: placeholders are the saved values, then the tangents; outputs are the gradients, one for each of
            ``signature.gradient_inputs``, ``None`` where undefined. ``None`` for an inference graph.
        saved: names of the saved values, tensors and then numbers; a saved primal keeps its placeholder's name.
        saved_bytes: bytes of the saved values that are not primals.
        unnoticed: names of the saved values that others may change, and that plain PyTorch does not save for all of the
            gradients that are computed from them here.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None
    num_outputs: int
    saved: tuple[str, ...]
    saved_bytes: int
    signature: GraphSignature
    unnoticed: frozenset[str] = frozenset()
