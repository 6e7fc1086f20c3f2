"""Parameters may be called what a graph node is called."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gradsplit.compile_core.backends.generated_kernels import compile_region
from gradsplit.compile_core.ir.regions import build_region
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions


def test_a_destination_named_like_a_node() -> None:
    with FakeTensorMode():
        module = make_fx(lambda a, b: (a @ b, (a @ b).sin()))(torch.empty(4, 4), torch.empty(4, 4))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    region = build_region("region", module, nodes, [nodes[-1]], {"mm": nodes[-1], "a_1": nodes[0]}, 0.5)
    run = compile_region(region, CompileOptions(), StageDump(None))()
    a, b, first, second = torch.randn(4, 4), torch.randn(4, 4), torch.empty(4, 4), torch.empty(4, 4)
    run([a, b, first, second])
    torch.testing.assert_close(first, (a @ b).sin() * 0.5)
    torch.testing.assert_close(second, (a @ b) * 0.5)
