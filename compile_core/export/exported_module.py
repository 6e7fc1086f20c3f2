"""``ExportedModule``: runs an exported graph as a module of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.export.conditions import ExportedTensor, compile_condition
from gradsplit.compile_core.export.module_tree import CONSTANTS, Tree, fill_modules
from gradsplit.compile_core.export.structures import Structure, build, collect
from gradsplit.compile_core.ir.source_writer import compile_function
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled


class ExportedModule(nn.Module):
    """An exported program as a module: parameters, buffers and submodules have the names of the program's.

    It is called as the program was, with tensors of the exported dtypes and sizes (others where dims are open) and with
    the other arguments equal; a call that is not raises ``ValueError``. Submodules hold tensors and cannot be called.
    Whether gradients are enabled, and which arguments take them, may differ from the exported call: where the program
    asked for that, it got the answer of that call.
    """

    def __init__(
        self,
        name: str,
        graph: fx.Graph,
        call: Structure,
        parameter_names: tuple[str, ...],
        result: Structure,
        arguments: tuple[ExportedTensor, ...],
        conditions: tuple[str, ...],
        modules: Tree,
        tensors: Mapping[str, torch.Tensor],
        training: bool | None,
    ) -> None:
        super().__init__()
        fill_modules(self, modules, tensors)
        constants = nn.Module()
        for node in graph.find_nodes(op="placeholder"):
            if node.meta["kind"] == "constant":
                constants.register_buffer(node.name, tensors[node.meta["path"]], persistent=False)
        if constants._buffers:
            self.add_module(CONSTANTS, constants)
        self._exported_name = name
        self._exported_args, self._exported_kwargs = call["tuple"]
        self._exported_parameter_names = parameter_names
        self._exported_result = result
        self._exported_arguments = arguments
        self._exported_conditions = tuple((text, compile_condition(text)) for text in conditions)
        self._exported_run = _run_function(graph, len(arguments))
        self._exported_run_without_grad = _without_grad_switches(graph, len(arguments)) or self._exported_run
        self._exported_training = training
        super().train(self.training if training is None else training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph; see the class."""
        args, kwargs = self._as_exported(args, kwargs)
        tensors: list[torch.Tensor] = []
        collect(self._exported_args, args, "args", tensors)
        collect(self._exported_kwargs, kwargs, "kwargs", tensors)
        for tensor, expected in zip(tensors, self._exported_arguments, strict=True):
            expected.check(tensor)
            if expected.same_as is not None and tensor is not tensors[expected.same_as]:
                other = self._exported_arguments[expected.same_as]
                raise ValueError(
                    f"{expected.place} and {other.place} are different tensors; the graph was exported with the same "
                    f"tensor for both"
                )
        for text, holds in self._exported_conditions:
            if not holds(args, kwargs):
                raise ValueError(
                    f"the exported graph holds only where {text}; export it again for such a call"
                )
        run = self._exported_run if torch.is_grad_enabled() else self._exported_run_without_grad
        return build(self._exported_result, run(self, *tensors))

    def _as_exported(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments given by name that were given by position at the export, and the other way round."""
        names, by_position = self._exported_parameter_names, len(self._exported_args["tuple"])
        late = names[len(args) : by_position]
        if late and all(name in kwargs for name in late):
            args = (*args, *[kwargs[name] for name in late])
            kwargs = {key: value for key, value in kwargs.items() if key not in late}
        early = names[by_position : len(args)]
        if early and len(args) == by_position + len(early) and not any(name in kwargs for name in early):
            kwargs = {**kwargs, **dict(zip(early, args[by_position:], strict=True))}
            args = args[:by_position]
        return args, kwargs

    def train(self, mode: bool = True) -> ExportedModule:
        """Raises ValueError where the program asked for its mode and was exported in the other one: what it does there
        is not in the graph."""
        exported = self._exported_training
        if exported is not None and mode != exported:
            words = ("evaluation", "training")
            raise ValueError(
                f"{self._exported_name} was exported in {words[exported]} mode, and its graph does only that; for "
                f"{words[mode]} export it again after .{'train' if mode else 'eval'}()"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"exported from {self._exported_name}"


def _run_function(graph: fx.Graph, count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``run(module, *tensors of the call)`` of a graph: state is read from the module at each call."""
    made = fx.Graph()
    arguments = [made.placeholder(f"argument_{position}") for position in range(count)]
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        kind, path = node.meta.get("kind"), node.meta.get("path")
        if node.op != "placeholder":
            copies[node] = made.node_copy(node, copies.__getitem__)
        elif kind == "argument":
            copies[node] = arguments[path]
        else:
            copies[node] = made.create_node(
                "get_attr", f"{CONSTANTS}.{node.name}" if kind == "constant" else path
            )
    code = made.python_code("self")
    return compile_function(code.src, "forward", dict(code.globals))


def _without_grad_switches(graph: fx.Graph, count: int) -> Callable[..., Any] | None:
    """What runs where gradients are disabled, if it is something else. The program's ``no_grad`` blocks end by enabling
    them again, as they were when it was exported; here they must stay as they are."""
    switches = [node for node in graph.nodes if node.target is set_grad_enabled]
    if not switches:
        return None
    if [node.args[0] for node in switches] != [False, True] * (len(switches) // 2):
        return _refuse_without_grad
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in switches:
            copies[node] = copy.node_copy(node, copies.__getitem__)
    return _run_function(copy, count)


def _refuse_without_grad(*args: Any) -> Any:
    raise Unsupported(
        "export-grad-mode",
        "the program enables gradients in its middle, and the exported graph does not know what it does where they are "
        "disabled around it",
        "call it with gradients enabled, and detach the results",
    )
