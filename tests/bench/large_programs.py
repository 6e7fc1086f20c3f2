"""Programs of any size, of the kinds that compile time might grow faster with than their size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LargeProgram:
    """A function of tensors, its arguments, and what is differentiated."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    leaves: Sequence[Tensor] = ()

    def step(self, function: Callable[..., Any]) -> list[Tensor]:
        """Results and gradients of one forward and backward by ``function``, this one or a compiled form."""
        results = function(*(self.arguments if self.leaves else deepcopy(self.arguments)))
        results = [results] if isinstance(results, Tensor) else list(results)
        found = [result.detach().clone() for result in results]
        if self.leaves:
            torch.stack([result.sum() for result in results]).sum().backward()
            for leaf in self.leaves:
                assert leaf.grad is not None
                found.append(leaf.grad)
                leaf.grad = None
        return found


def chain(size: int, gradient: bool = True) -> LargeProgram:
    """One pointwise operation after the other."""

    def function(x: Tensor) -> Tensor:
        for _ in range(size // 4):
            x = (x.sin() * 1.01 + 0.1).tanh()
        return x

    x = torch.randn(64, requires_grad=gradient)
    return LargeProgram(function, (x,), [x] if gradient else [])


def independent(size: int) -> LargeProgram:
    """Many small operations that nothing joins."""

    def function(xs: list[Tensor]) -> list[Tensor]:
        return [(x * 2).sin() for x in xs]

    xs = [torch.randn(8 + i % 5, requires_grad=True) for i in range(size // 2)]
    return LargeProgram(function, (xs,), xs)


def fan_out(size: int) -> LargeProgram:
    """One value with many readers, added up."""

    def function(x: Tensor) -> Tensor:
        total = x
        for index in range(size // 3):
            total = total + (x * (index % 7)).sin()
        return total

    x = torch.randn(64, requires_grad=True)
    return LargeProgram(function, (x,), [x])


def reductions(size: int) -> LargeProgram:
    """Sums that the next operation spreads again: no two steps fuse into one loop."""

    def function(x: Tensor) -> Tensor:
        for _ in range(size // 4):
            x = (x - x.mean(-1, keepdim=True)) * 1.01
            x = x.sin()
        return x

    x = torch.randn(8, 16, requires_grad=True)
    return LargeProgram(function, (x,), [x])


def states(size: int) -> LargeProgram:
    """A chain that returns each of its steps."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        found = []
        for _ in range(size // 3):
            x = (x * weight + 0.1).sin()
            found.append(x)
        return found

    x, weight = torch.randn(8), torch.randn(8, requires_grad=True)
    return LargeProgram(function, (x, weight), [weight])


def shared(size: int) -> LargeProgram:
    """Products whose results are scaled and shifted by the same tensors."""

    def function(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        total = x
        for _ in range(size // 6):
            x = torch.softmax(x @ weight, -1) * scale + shift
            total = total + x
        return total

    tensors = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8), torch.randn(8)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    return LargeProgram(function, tensors, leaves)


def sums(size: int) -> LargeProgram:
    """A sum of many parameters, of which only the end is read in the backward."""

    def function(xs: list[Tensor]) -> Tensor:
        total = xs[0]
        for x in xs:
            total = total + x * 2
        return total.tanh()

    xs = [torch.randn(8, requires_grad=True) for _ in range(size // 2)]
    return LargeProgram(function, (xs,), xs)


class Block(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        return y if self.norm is None else x + self.norm(y)


def layers(size: int, norm: bool = False) -> LargeProgram:
    """Linear and activation, many times; with layer norm and a residual, too."""
    count = size // (4 if norm else 2)
    return of_module(nn.Sequential(*(Block(8, norm) for _ in range(count))), torch.randn(4, 8))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, 2, 8).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, 16))
        return x + self.down(F.gelu(self.up(self.second(x))))


def transformer(size: int) -> LargeProgram:
    """Blocks of attention; one counts as 20 operations."""
    return of_module(nn.Sequential(*(Attention() for _ in range(size // 20))), torch.randn(2, 6, 16))


def of_module(module: nn.Module, x: Tensor) -> LargeProgram:
    parameters = list(module.parameters())

    # A function, so that what is compiled is told apart by nothing but its size.
    def function(x: Tensor) -> Tensor:
        return module(x)

    return LargeProgram(function, (x,), parameters)


def views(size: int) -> LargeProgram:
    """Slices of one tensor, joined again."""

    def function(x: Tensor) -> Tensor:
        parts = [x[index : index + 8].view(2, 4).t() * 2 for index in range(size // 4)]
        return torch.stack(parts)

    x = torch.randn(size // 4 + 8, requires_grad=True)
    return LargeProgram(function, (x,), [x])


def writes(size: int) -> LargeProgram:
    """Writes in place to parts of one buffer."""

    def function(x: Tensor) -> Tensor:
        buffer = torch.zeros(16, 8)
        for index in range(size // 3):
            buffer[index % 16] = x[index % 16] * index
        return buffer

    x = torch.randn(16, 8, requires_grad=True)
    return LargeProgram(function, (x,), [x])


def updates(size: int) -> LargeProgram:
    """One buffer changed in place, as a whole."""

    def function(x: Tensor) -> Tensor:
        buffer = torch.zeros(16, 8)
        for _ in range(size // 2):
            buffer.add_(x).mul_(0.9)
        return buffer

    x = torch.randn(16, 8, requires_grad=True)
    return LargeProgram(function, (x,), [x])


def foreach(size: int) -> LargeProgram:
    """An optimizer's step over many parameters."""

    def function(parameters: list[Tensor], gradients: list[Tensor], means: list[Tensor]) -> list[Tensor]:
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_addcdiv_(parameters, gradients, torch._foreach_add(torch._foreach_abs(means), 1.0))
        return [parameters[0] * 1]

    def lists() -> list[Tensor]:
        return [torch.zeros(8 + index % 3) for index in range(size // 4)]

    return LargeProgram(function, (lists(), [x + 0.1 for x in lists()], lists()))


def diamond(size: int) -> LargeProgram:
    """Two values, each computed from both before: as many paths as two to the power of the depth."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        for _ in range(size // 4):
            a, b = (a + b) * 0.5, (a - b).sin()
        return a + b

    a, b = (torch.randn(64, requires_grad=True) for _ in range(2))
    return LargeProgram(function, (a, b), [a, b])


def products(size: int) -> LargeProgram:
    """A chain of matrix products with one weight."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(size // 2):
            x = (x @ weight).tanh()
        return x

    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    return LargeProgram(function, (x, weight), [weight])


def breaks(size: int, *, inside: bool = False, variables: bool = False) -> LargeProgram:
    """Straight-line code in which a graph ends after each 50 operations; inside a block, or with a variable for each
    line, too."""
    lines, indent = ["def function(x):"], "    "
    if inside:
        lines.append("    with torch.enable_grad():")
        indent *= 2
    name = "x"
    for index in range(size // 4):
        if index % 12 == 11:
            lines.append(f"{indent}end_graph()")
        before, name = name, f"x{index}" if variables else name
        lines.append(f"{indent}{name} = ({before}.sin() * 1.01 + 0.1).tanh()")
    names: dict[str, Any] = {"end_graph": end_graph, "torch": torch}
    exec("\n".join([*lines, f"    return {name}"]), names)
    x = torch.randn(64, requires_grad=True)
    return LargeProgram(names["function"], (x,), [x])


@torch.compiler.disable
def end_graph() -> None:
    """Ends a graph."""


def constants(size: int) -> LargeProgram:
    """Numbers and tensors made on the way, random ones among them."""

    def function(x: Tensor) -> Tensor:
        for index in range(size // 4):
            x = F.dropout(x + torch.full((8,), float(index % 9)), 0.0) * torch.arange(8)
            x = x.tanh()
        return x

    x = torch.randn(4, 8, requires_grad=True)
    return LargeProgram(function, (x,), [x])


PROGRAMS: dict[str, Callable[[int], LargeProgram]] = {
    "chain": chain,
    "chain forward": lambda size: chain(size, gradient=False),
    "independent": independent,
    "fan out": fan_out,
    "reductions": reductions,
    "states": states,
    "shared": shared,
    "sums": sums,
    "layers": layers,
    "layers with norm": lambda size: layers(size, norm=True),
    "transformer": transformer,
    "views": views,
    "writes": writes,
    "updates": updates,
    "foreach": foreach,
    "diamond": diamond,
    "products": products,
    "breaks": breaks,
    "breaks in a block": lambda size: breaks(size, inside=True),
    "breaks with variables": lambda size: breaks(size, variables=True),
    "constants": constants,
}
