"""Modes and switches that a program turns between its operations, as a trace sees them.

A trace follows those that say which operators run, such as grad mode, autocast or the choice of an attention: the
operators are in the graph, the modes are not. Of a default dtype the operators' arguments are told. What only says how
an operator computes would be forgotten: the caller runs such a program with torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx import traceback as node_metadata
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.torch_facts.thread_state import enter_inference_mode, set_default_dtype
from gradsplit.compile_core.torch_facts.torch_switches import SWITCHES, Switch

_DEFAULT = "default_dtype"


def refuse_modes(module: GraphModule) -> None:
    """Refuses a program, or a body that it holds, which a trace cannot follow.

    Raises:
        Unsupported: it enters inference mode, or turns a switch that tells torch's kernels how to compute.
    """
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        if node.target is enter_inference_mode:
            raise Unsupported("inference-mode", "the program enters inference mode")
        for switch in SWITCHES:
            if switch.concerns_kernels and _turns(node, switch):
                name = getattr(switch.set, "__name__", str(switch.set)).lstrip("_")
                raise Unsupported("switch", f"the program turns a switch of torch's kernels ({name})")


def _turns(node: Node, switch: Switch) -> bool:
    count = len(switch.prefix)
    is_setter = node.target is switch.set and node.args[:count] == switch.prefix
    return is_setter and node.args[count:] != switch.read()


def noted_default_dtypes() -> Mapping[Any, Callable[..., Any]]:
    """What is run in the place of calls of the captured graph, for ``settle_default_dtypes``."""
    return {set_default_dtype: _set_and_note}


def _set_and_note(dtype: torch.dtype) -> None:
    set_default_dtype(dtype)
    if node_metadata.has_preserved_node_meta():
        noted = node_metadata.current_meta.get("custom", {})
        node_metadata.current_meta["custom"] = {**noted, _DEFAULT: dtype}


def settle_default_dtypes(module: GraphModule, fake_mode: FakeTensorMode) -> None:
    """Makes operators that were traced under another default dtype than the present one independent of it."""
    present = torch.get_default_dtype()
    for node in module.graph.nodes:
        if node.meta.get("custom", {}).get(_DEFAULT, present) is present or node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        takes_dtype = schema is not None and any(argument.name == "dtype" for argument in schema.arguments)
        if takes_dtype and node.kwargs.get("dtype") is None and isinstance(node.meta["val"], torch.Tensor):
            node.update_kwarg("dtype", node.meta["val"].dtype)
        elif not _has_same_dtypes(node, fake_mode):
            raise Unsupported(
                "default-dtype", f"{node.target} depends on a default dtype that the program sets"
            )


def _has_same_dtypes(node: Node, fake_mode: FakeTensorMode) -> bool:
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with fake_mode:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return _dtypes_of(result) == _dtypes_of(node.meta["val"])


def _dtypes_of(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
