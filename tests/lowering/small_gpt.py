"""A small GPT, its joint graph, and a cut of this graph into forward and backward that saves whatever is
needed.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm_1(x)).split(width, dim=2)
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


class SmallGPT(nn.Module):
    def __init__(
        self, vocabulary: int = 67, width: int = 32, heads: int = 2, layers: int = 2, length: int = 24
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def joint_graph(
    model: nn.Module, *arguments: Tensor, autocast: torch.dtype | None = None
) -> torch.fx.GraphModule:
    """``(parameters, *arguments) -> (loss, *gradients)``."""
    names = [name for name, _ in model.named_parameters()]
    device = arguments[0].device.type

    def step(parameters: list[Tensor], *arguments: Tensor) -> tuple[Tensor, ...]:
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        with torch.autocast(
            device, autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False
        ):
            loss = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), arguments)
        return loss, *torch.autograd.grad(loss, leaves)

    tracer = make_fx(step, decomposition_table=decomposition_table(device), tracing_mode="fake")
    graph = tracer(list(model.parameters()), *arguments)
    graph.graph.eliminate_dead_code()
    return graph


def cut(joint: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward ``inputs -> (loss, *saved)`` and backward ``(inputs, saved) -> gradients``; nothing is
    recomputed.
    """
    nodes = list(joint.graph.nodes)
    loss, *gradients = joint.graph.output_node().args[0]  # type: ignore[misc]
    forward_nodes: set[torch.fx.Node] = set()
    pending = [loss]
    while pending:
        node = pending.pop()
        if node not in forward_nodes:
            forward_nodes.add(node)
            pending += node.all_input_nodes
    for node in nodes:  # statistics that only the backward reads come out of forward operators
        if node.target is operator.getitem and node.args[0] in forward_nodes:
            forward_nodes.add(node)
    saved = [
        node
        for node in nodes
        if node in forward_nodes
        and node.op == "call_function"
        and isinstance(node.meta.get("val"), Tensor)
        and any(user not in forward_nodes and user.op != "output" for user in node.users)
    ]
    inputs = [node for node in nodes if node.op == "placeholder"]
    return (
        _extracted(nodes, inputs, [loss, *saved], lambda node: node in forward_nodes),
        _extracted(nodes, [*inputs, *saved], gradients, lambda node: True),
    )


def _extracted(nodes: list, inputs: list, outputs: list, wanted) -> torch.fx.GraphModule:  # type: ignore[no-untyped-def]
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node.op == "call_function" and node not in copies and wanted(node):
            copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(torch.nn.Module(), graph)
