"""``export``: one call of a program becomes one graph, or an error that says which line stands against it."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from gradsplit.compile_core.capture import PlainCall, SizeHistory, capture
from gradsplit.compile_core.capture.directives import leave_alone
from gradsplit.compile_core.compiled_calls.call_targets import original_of
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule
from gradsplit.compile_core.compiled_calls.kept_random_state import kept_random_state
from gradsplit.compile_core.errors import CompileError, Unsupported
from gradsplit.compile_core.export.conditions import ExportedTensor, conditions_of
from gradsplit.compile_core.export.exported import Exported, verify_exported
from gradsplit.compile_core.export.module_tree import add_tensor, describe_modules
from gradsplit.compile_core.export.open_dims import open_dims
from gradsplit.compile_core.export.print_program import place_of, rename_reserved, show_spec, unwritable
from gradsplit.compile_core.export.structures import Structure, describe
from gradsplit.compile_core.export.without_fakes import without_fakes
from gradsplit.compile_core.guard_checks.check import compile_check, explain_failure
from gradsplit.compile_core.ir.captured import CapturedFrame, GraphInput
from gradsplit.compile_core.ir.source_writer import compile_function
from gradsplit.compile_core.ir.sources import LocalSource, path_words
from gradsplit.compile_core.ir.tensor_spec import device_type_of

logger = logging.getLogger(__name__)


def _call(callee: Any, args: Any, kwargs: Any) -> Any:
    """What is captured: so all tensors of the call lie in ``args`` and ``kwargs``, and hooks of a module count."""
    return callee(*args, **kwargs)


@leave_alone
def export(
    fn_or_module: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = True,
) -> Exported:
    """One whole graph of a call, without running it.

    Args:
        fn_or_module: a function or module. Its parameters, buffers and the tensors that it holds elsewhere may be on
            the meta device or fake: nothing is computed.
        args, kwargs: of an example call: tensors, real or not, literals, and containers of them. Only tensors may
            differ at later calls.
        dynamic_shapes: which sizes may differ, as ``torch.export.export`` takes it: for each argument, by name or in
            order, ``None``, or for a tensor a dictionary or sequence of dims with ``torch.export.Dim`` or
            ``Dim.DYNAMIC``, and the same within containers. Sizes marked by ``mark_dynamic`` are open, too.
        strict: refuse a program that changes Python objects, as by counting calls, which a graph cannot; ``False``
            leaves such changes out, with a warning.

    Returns:
        The graph, with parameters and buffers under their names; it shares their memory. Modes of the program, such as
        whether it trains, are those of this call; gradients are enabled in it.

    Raises:
        Unsupported: the call is not one graph, or is one that cannot be written down, with the user's line.
        CompileError: a size that is to differ cannot.
        TypeError, ValueError: a wrong argument.
    """
    callee = fn_or_module._orig_mod if isinstance(fn_or_module, CompiledModule) else original_of(fn_or_module)
    if not callable(callee):
        raise TypeError(f"export takes a function or a torch.nn.Module, not {type(callee).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args is a tuple of the arguments, not {type(args).__name__}")
    call = (callee, tuple(args), dict(kwargs or {}))
    for place, value in zip(("args", "kwargs"), call[1:], strict=True):
        _describe(place, value, lambda found: {"tensor": 0} if isinstance(found, torch.Tensor) else None)
    with kept_random_state(), torch.enable_grad():
        names = _parameter_names(callee, len(call[1]))
        call, device = without_fakes(call)
        with open_dims(dynamic_shapes, call[1], call[2], names) as opened:
            frame = _capture(call)
            opened.check(frame)
        return _ExportedCall(frame, call, names, device, strict, opened.dims_of()).exported()


def _capture(call: tuple[Any, ...]) -> CapturedFrame:
    try:
        frame = capture(
            _call,  # type: ignore[arg-type]
            call,
            may_break=lambda reason: False,
            original_of=original_of,
            history=SizeHistory(),
        )
    except PlainCall as plain:
        raise Unsupported(
            "export-raises",
            f"the call raises an exception, so it has no graph: {plain}",
            "make the plain call work first",
        ) from None
    reason = frame.break_reason
    if reason is not None:
        stack = [place for place in reason.stack if place.filename != __file__]
        raise Unsupported(
            reason.reason_id,
            f"{_name(call[0])} cannot be exported as one graph: {reason.explanation}",
            reason.hint
            or "move this line out of what is exported, or make it an operator with torch.library.custom_op",
            reason.location,
            stack,
        )
    if frame.graph is None:
        raise Unsupported(
            "export-empty", f"{_name(call[0])} computes nothing with tensors", "export what does"
        )
    return frame


def _name(callee: Any) -> str:
    return getattr(callee, "__qualname__", None) or type(callee).__qualname__


def _parameter_names(callee: Any, count: int) -> tuple[str, ...]:
    """The names of a callable's parameters that may be given by position and by name."""
    function = callee.forward if isinstance(callee, nn.Module) else callee
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    only = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_ONLY]
    return () if only else tuple(names)


class _ExportedCall:
    """Makes an ``Exported`` of a captured call."""

    def __init__(
        self,
        frame: CapturedFrame,
        call: tuple[Any, ...],
        names: tuple[str, ...],
        device: str,
        strict: bool,
        open_dims_of: Mapping[int, tuple[int, ...]],
    ) -> None:
        assert frame.graph is not None and frame.runner is not None
        self.frame, self.call, self.names, self.device, self.strict = frame, call, names, device, strict
        self.runner, self.open_dims_of = frame.runner, open_dims_of
        self.guards = frame.late_guards() if frame.late_guards is not None else frame.guards
        self.tensor_names: dict[int, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.arguments: list[ExportedTensor] = []
        self.position_of: dict[int, int] = {}

    def exported(self) -> Exported:
        callee = self.call[0]
        self._check_changes()
        real = compile_check(self.frame)(*self.call)
        if type(real) is not list:
            raise CompileError(
                f"the call is not as it was captured: {explain_failure(self.frame, self.call)}"
            )
        tree = {"parameters": {}, "buffers": {}, "modules": {}}
        if isinstance(callee, nn.Module):
            tree = describe_modules(callee, self.tensor_names)
            for tensors in (callee.named_parameters(), callee.named_buffers()):
                self.tensors |= {self.tensor_names[id(tensor)]: tensor for _, tensor in tensors}
        structure = {
            "tuple": [self._structure("args", self.call[1]), self._structure("kwargs", self.call[2])]
        }
        graph = self._graph(real, tree)
        exported = Exported(
            _name(callee),
            graph,
            structure,
            self.names,
            self._result(graph, real),
            tuple(self.arguments),
            tuple(conditions_of(self.guards)),
            tree,
            self.tensors,
            self._training(),
            self.device or device_type_of([*self.tensors.values(), *real]),
        )
        if self.device:
            exported = replace(exported, device="meta").on(self.device)  # tensors without data stay on meta
        verify_exported(exported)
        return exported

    def _check_changes(self) -> None:
        changes = [change.replace("callee.", "") for change in self.runner.changes]
        if not changes:
            return
        shown = ", ".join(changes[:5]) + (f" and {len(changes) - 5} more" if len(changes) > 5 else "")
        if self.strict:
            raise Unsupported(
                "export-side-effect",
                f"{_name(self.call[0])} changes {shown}, which an exported graph cannot do",
                "return the value, write tensors in place (buffer.copy_(...)), set it before the export; "
                "or export with strict=False, which leaves such changes out",
            )
        logger.warning("%s changes %s, which is not in the exported graph", _name(self.call[0]), shown)

    def _structure(self, place: str, value: Any) -> Structure:
        """The structure of arguments; their tensors are noted in its order."""

        def leaf(found: Any) -> Structure | None:
            if not isinstance(found, torch.Tensor):
                return None
            position = len(self.arguments)
            example, marked = tuple(found.shape), self.open_dims_of.get(id(found), ())
            sizes = tuple(None if dim in marked else size for dim, size in enumerate(example))
            same_as = self.position_of.setdefault(id(found), position)
            dtype = str(found.dtype).removeprefix("torch.")
            self.arguments.append(
                ExportedTensor(
                    "",
                    dtype,
                    found.device.type,
                    sizes,
                    example,
                    found.requires_grad,
                    None if same_as == position else same_as,
                )
            )
            return {"tensor": position}

        structure = _describe(place, value, leaf)
        for position, found in _places(structure, place):
            self.arguments[position] = replace(self.arguments[position], place=found)
        return structure

    def _graph(self, real: Sequence[Any], tree: dict[str, Any]) -> fx.Graph:
        assert self.frame.graph is not None
        captured = self.frame.graph
        graph = captured.module.graph
        nodes = graph.find_nodes(op="placeholder")
        for node, entry, tensor in zip(nodes, captured.inputs, real, strict=True):
            kind, path = self._input(entry, tensor, tree)
            node.meta |= {"kind": kind, "path": path}
            node._rename(self._shown_argument(path) if kind == "argument" else path)
        rename_reserved(graph)
        for node in graph.nodes:
            if node.op == "output":
                continue
            if node.op == "get_attr":
                user = next(iter(node.users))
                raise unwritable(user, f"a call of {getattr(user.target, '__name__', user.target)}")
            node.meta["spec"] = show_spec(node.meta["example_value"])
            node.meta["place"] = place_of(node)
            if "module" in node.meta:
                node.meta["module"] = node.meta["module"].removeprefix("callee").removeprefix(".")
        return graph

    def _shown_argument(self, position: int) -> str:
        """A name for an argument's node: that of the parameter, or the key."""
        place = self.arguments[position].place
        by_position = re.fullmatch(r"args\[(\d+)\]", place)
        if by_position is not None and int(by_position[1]) < len(self.names):
            return self.names[int(by_position[1])]
        return re.sub(r"\W+", "_", place.removeprefix("kwargs")).strip("_")

    def _input(self, entry: GraphInput, tensor: Any, tree: dict[str, Any]) -> tuple[str, Any]:
        if not isinstance(tensor, torch.Tensor):
            raise Unsupported(
                "export-number", f"{entry.source} is a number that differs between calls", "pass a tensor"
            )
        position = self.position_of.get(id(tensor))
        if position is not None:
            sizes = [size if isinstance(size, int) else None for size in entry.example.shape]
            self.arguments[position] = replace(self.arguments[position], sizes=tuple(sizes))
            return "argument", position
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        known = self.tensor_names.get(id(tensor))
        if known is None:
            words = path_words(entry.source)
            known = ".".join(
                words[1:] if isinstance(entry.source.root, LocalSource) and len(words) > 1 else words
            )
            known = _free_name(known, self.tensors)
            if kind == "parameter":
                add_tensor(tree, known, True)
            elif entry.kind == "buffer":
                add_tensor(tree, known, False)
            else:
                kind = "constant"
            if tensor.requires_grad and not tensor.is_leaf:
                raise Unsupported(
                    "export-history",
                    f"{entry.source} has a history in autograd, which no file can hold",
                    "pass it as an argument",
                )
            if tensor.requires_grad and kind != "parameter":
                raise Unsupported(
                    "export-leaf",
                    f"{entry.source} takes gradients and is no parameter",
                    "make it a torch.nn.Parameter, or pass it as an argument",
                )
            self.tensors[known] = tensor
            self.tensor_names[id(tensor)] = known
        return kind, known

    def _result(self, graph: fx.Graph, real: Sequence[Any]) -> Structure:
        """The structure of the result: the runner's lines for it, run with stand-ins for the graph's results."""
        output = list(graph.nodes)[-1]
        nodes = list(output.args[0])  # type: ignore[arg-type]
        stand_ins = [torch.empty(0) for _ in nodes]
        lines = "\n".join(f"    {line}" for line in self.runner.result_lines)
        names = ", ".join(f"l_{name}" for name in self.frame.arguments)
        rebuild = compile_function(f"def rebuild(out, {names}):\n{lines}\n", "rebuild", self.runner.constants)
        value = rebuild(stand_ins, *self.call)
        inputs = {
            id(tensor): node for tensor, node in zip(real, graph.find_nodes(op="placeholder"), strict=True)
        }
        positions = {id(tensor): position for position, tensor in enumerate(stand_ins)}

        is_open = any(None in tensor.sizes for tensor in self.arguments)
        reads_sizes = is_open and any(
            ".shape" in line or ".stride" in line for line in self.runner.result_lines
        )

        def leaf(found: Any) -> Structure | None:
            if not isinstance(found, torch.Tensor):
                if type(found) in (int, float) and reads_sizes:
                    raise Unsupported(
                        "export-number",
                        f"the result has the number {found}, which may differ with the open sizes",
                        "return tensors, or compute it from the sizes of the results",
                    )
                return None
            if id(found) not in positions:
                if id(found) not in inputs and id(found) in self.position_of:
                    inputs[id(found)] = self._unread_argument(graph, found)
                if id(found) not in inputs:
                    raise Unsupported(
                        "export-result",
                        "the result has a tensor that the graph neither computes nor reads",
                        "leave it out",
                    )
                positions[id(found)] = len(nodes)
                nodes.append(inputs[id(found)])
            return {"tensor": positions[id(found)]}

        try:
            structure = describe(value, leaf)
        except TypeError as error:
            raise Unsupported(
                "export-result",
                f"the result has a {error}, which cannot be written to a file",
                "return tensors, literals, and tuples, lists and dictionaries of them",
            ) from None
        output.args = (tuple(nodes),)
        return structure

    def _unread_argument(self, graph: fx.Graph, tensor: torch.Tensor) -> fx.Node:
        """The placeholder of an argument that the program only hands out."""
        position = self.position_of[id(tensor)]
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(f"argument_{position}")
        node.meta |= {"kind": "argument", "path": position, "spec": show_spec(tensor)}
        return node

    def _training(self) -> bool | None:
        """The mode of the program, if it read that."""
        sources = [str(source) for guard in self.guards for source in guard.sources]
        was_read = any(source.endswith(("['training']", ".training")) for source in sources)
        return self.call[0].training if was_read and isinstance(self.call[0], nn.Module) else None


def _describe(place: str, value: Any, leaf: Callable[[Any], Structure | None]) -> Structure:
    try:
        return describe(value, leaf)
    except TypeError as error:
        raise TypeError(
            f"{place} of an export has a {error}; tensors, literals, and tuples, lists and dictionaries of "
            f"them can be written to a file"
        ) from None


def _places(structure: Structure, place: str) -> Iterator[tuple[int, str]]:
    ((kind, content),) = structure.items()
    if kind == "tensor":
        yield content, place
    elif kind in ("tuple", "list", "named"):
        for index, item in enumerate(content[2] if kind == "named" else content):
            yield from _places(item, f"{place}[{index}]")
    elif kind != "value":
        for key, item in content if kind == "dict" else content[1]:
            yield from _places(item, f"{place}[{key!r}]")


def _free_name(wanted: str, taken: Mapping[str, Any]) -> str:
    name, number = wanted, 1
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    return name
