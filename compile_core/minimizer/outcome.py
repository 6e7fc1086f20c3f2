"""What becomes of a graph when it is compiled and run, forward and backward, beside plain PyTorch.

An outcome is compared with others by its ``kind`` and ``what``: the error's type and message without the names and
numbers that differ between sizes of the same graph. So a smaller graph that fails for another reason does not count.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gradsplit.compile_core.torch_facts.symbolic_numbers import repeated_dims

# Compiles a graph for inputs; the result is called with them.
CompileGraph = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# How far a compiled result may be from the one in float64: in units of plain PyTorch's own distance, and relative to
# the size of the result; the latter is what a fault must be larger than to be seen.
_TIMES_PLAIN = 8.0
_RELATIVE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


@dataclass(frozen=True)
class Outcome:
    """What became of one trial.

    Attributes:
        kind: "equal", "raises", "crashes", "hangs", "differs", or "plain raises" where plain PyTorch does.
        what: what distinguishes this failure from others of its kind.
        text: the whole message.
        figures: what was measured besides, by name.
        rank: on which it failed, of those of a group.
    """

    kind: str
    what: str = ""
    text: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("equal", "plain raises")

    def is_like(self, other: Outcome) -> bool:
        return (self.kind, self.what, self.rank) == (other.kind, other.what, other.rank)

    def __str__(self) -> str:
        return self.kind if not self.text else f"{self.kind}: {self.text}"


def outcome_of(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    compile_graph: CompileGraph,
    compares: bool,
    takes_gradients: bool = True,
) -> Outcome:
    """Runs the graph plainly and compiled, on copies of the inputs.

    Args:
        inputs: tensors, and numbers.
        compares: results, gradients and changed inputs are compared with plain PyTorch's, within what float64 says that
            is exact.
        takes_gradients: of the results, with respect to inputs that require them.
    """
    try:
        plain = results_of(module, inputs, takes_gradients)
    except Exception as error:
        return Outcome("plain raises", type(error).__name__, str(error))
    try:
        torch.manual_seed(0)
        found = results_of(compile_graph(module, inputs), inputs, takes_gradients)
    except Exception as error:
        return raised(error)
    if not compares:
        return Outcome("equal")
    try:
        exact = results_of(
            copy.deepcopy(module).double(), [_as_float64(value) for value in inputs], takes_gradients
        )
    except Exception:
        exact = plain  # the graph asks for other dtypes
    for name, expected in plain.items():
        difference = difference_of(found.get(name), expected, exact.get(name))
        if difference:
            part = name.split(" ")[0]
            return Outcome("differs", f"{part} {difference}", f"the {name} {difference}")
    return Outcome("equal")


def results_of(call: Callable[..., Any], inputs: Sequence[Any], takes_gradients: bool) -> dict[str, Tensor]:
    """Results, gradients and inputs as they are afterwards, by name; each call with equal inputs runs alike."""
    given = [copied(value) for value in inputs]
    torch.manual_seed(0)
    with torch.set_grad_enabled(takes_gradients):
        # An input that the graph changes is no leaf in the program either.
        results = call(*[value.view_as(value) if _wants_gradient(value) else value for value in given])
    found = {f"result {k}": result for k, result in enumerate(results) if isinstance(result, Tensor)}
    wanted = [result for result in found.values() if result.requires_grad]
    sources = [value for value in given if _wants_gradient(value)]
    if takes_gradients and wanted and sources:
        cotangents = [_cotangent(result, seed) for seed, result in enumerate(wanted)]
        gradients = torch.autograd.grad(wanted, sources, cotangents, allow_unused=True)
        found |= {f"gradient {k}": g for k, g in enumerate(gradients) if g is not None}
    found |= {f"input {k}": value.detach() for k, value in enumerate(given) if isinstance(value, Tensor)}
    return {name: tensor.detach() for name, tensor in found.items()}


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def copied(value: Any) -> Any:
    """A copy of a tensor with the same strides, a leaf that requires a gradient as it does; other values themselves."""
    if not isinstance(value, Tensor):
        return value
    plain = value.detach()
    if repeated_dims(value.shape, value.stride()):
        copy = plain.clone()
    else:
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        copy.copy_(plain)
    return copy.requires_grad_(value.requires_grad and (copy.is_floating_point() or copy.is_complex()))


def _cotangent(result: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    return drawn.to(result.device, result.dtype)


def _as_float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def difference_of(found: Tensor | None, expected: Tensor, exact: Tensor | None) -> str:
    """What a compiled tensor has else than plain PyTorch's, in words; "" for nothing.

    Args:
        exact: the same in float64, which says how far plain PyTorch's is from exact; ``None`` where nobody knows.
    """
    if found is None:
        return "is missing"
    if found.shape != expected.shape:
        return "has another shape"
    if found.dtype != expected.dtype:
        return "has another dtype"
    if not expected.is_floating_point():
        return "" if torch.equal(found, expected) else "has other values"
    if exact is None or exact.shape != expected.shape or not exact.is_floating_point():
        exact = expected
    plain, compiled, exact = expected.double(), found.double(), exact.double()
    if not torch.equal(plain.isnan(), compiled.isnan()):
        return "has no numbers at other places"
    ordinary = plain.isfinite() & compiled.isfinite() & exact.isfinite()
    if not torch.equal(plain[~ordinary].nan_to_num(), compiled[~ordinary].nan_to_num()):
        return "has infinities at other places"
    plain, compiled, exact = plain[ordinary], compiled[ordinary], exact[ordinary]
    if plain.numel() == 0:
        return ""
    scale = exact.square().mean().sqrt().item()
    allowed = _TIMES_PLAIN * (plain - exact).abs().max().item() + _RELATIVE.get(expected.dtype, 1e-4) * scale
    return "" if (compiled - exact).abs().max().item() <= allowed else "has other values"


def raised(error: Exception) -> Outcome:
    """The outcome of a trial that raised this."""
    name = type(error).__name__
    return Outcome("raises", f"{name}: {_without_names(str(error))}", f"{name}: {error}")


def _without_names(message: str) -> str:
    """The first line of a message without numbers and names that change with the graph's size."""
    line = message.strip().partition("\n")[0]
    line = re.sub(r"[\w./-]*/[\w./-]+", "PATH", line)
    line = re.sub(r"\b\w*\d\w*\b", "N", line)
    line = re.sub(r"[\[(][N, \[\]()]*[\])]", "N", line)
    return line[:200]
