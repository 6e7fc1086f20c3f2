"""The bridge: TorchInductor makes the kernels, everything round them is ours.

Capture, joint trace, partition and schedule are those of the default backend; each compute region of a schedule goes
to TorchInductor as one graph. Measured beside the default backend it separates the quality of kernels from that of
schedules. This is the one file that uses torch's compiler, which is imported when the first region comes.

Random numbers are TorchInductor's own, seeded from torch's generator; with the option ``fallback_random`` they are
those of the plain program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from gradsplit.compile_core.errors import CompileError, Unsupported
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.tensor_spec import same_strides
from gradsplit.compile_core.observe.diagram import draw_graph
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.runtime.executable import Region

_NO_SETTINGS: Mapping[str, Any] = {}


@cache
def _inductor() -> Any:
    try:
        import torch._inductor.compile_fx
        import torch._inductor.config
        import torch._inductor.decomposition
        import torch._inductor.fx_passes.joint_graph
        import torch._inductor.lowering
        import torch._inductor.virtualized
    except ImportError as error:
        raise CompileError(
            f'backend="inductor" needs TorchInductor, which torch has not here: {error}'
        ) from error
    return torch._inductor


def has_option(name: str) -> bool:
    """Whether TorchInductor has a setting of this name."""
    return name in _inductor().config.get_config_copy()


def decompositions(
    device_type: str, options: CompileOptions, settings: Mapping[str, Any] = _NO_SETTINGS
) -> Mapping[Any, Callable[..., Any]]:
    """TorchInductor's own, which its lowering relies on."""
    del device_type
    with _configured(options, settings):
        return dict(_inductor().decomposition.select_decomp_table())


def compile_region(
    compute: Compute, options: CompileOptions, dump: StageDump, settings: Mapping[str, Any] = _NO_SETTINGS
) -> Callable[[], Region]:
    """One graph for TorchInductor, under settings of its own; results with a destination are stored there by its
    kernels."""
    inductor = _inductor()
    for node in compute.module.graph.nodes:
        if isinstance(node.target, KeptCall):
            raise Unsupported("kept-call", f"TorchInductor takes no call of {node.target}")
    module = _with_stores(compute)
    dump.diagram(f"{compute.name}.graph", lambda: draw_graph(compute.name, compute.module))
    examples = [node.meta["val"] for node in graph_inputs(module)]
    strides = [None if node is None else tuple(node.meta["val"].stride()) for node in graph_results(module)]
    # Kernels are timed on random numbers.
    devices = {example.device for example in examples if example.device.type == "cuda"}
    with timed("inductor"), _configured(options, settings), _tracing(module), torch.random.fork_rng(devices):
        module = inductor.fx_passes.joint_graph.joint_graph_passes(_decomposed(module))
        _promise_layouts(module, strides)
        run = inductor.compile_fx.compile_fx_inner(
            module, examples, is_backward=compute.name.startswith("backward")
        )
    stored = {name: position for position, name in enumerate(compute.destinations)}
    num_inputs = len(compute.inputs)

    def run_region(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        destinations = arguments[num_inputs:]
        results = iter(map(_as_promised, run(arguments), strides))
        return [destinations[stored[name]] if name in stored else next(results) for name in compute.outputs]

    return lambda: run_region


def _configured(options: CompileOptions, chosen: Mapping[str, Any]) -> Any:
    """TorchInductor's own settings for the time of a compilation."""
    settings = {
        **chosen,
        # They are recorded round whole programs.
        "triton.cudagraphs": False,
        "fallback_random": options.fallback_random,
        # Products come padded (``pad_products``), for forward and backward together. TorchInductor would pad them
        # after the trace, and put other strides in the place of those that the backward and the program speak of.
        "shape_padding": False,
    }
    # The rest is as TorchInductor has it, unless an option says otherwise.
    for name in {"max_autotune", "epilogue_fusion"} & options.changed:
        settings[name] = getattr(options, name)
    return _inductor().config.patch(settings)


@contextmanager
def _tracing(module: GraphModule) -> Iterator[None]:
    """What TorchInductor expects to be compiled in: the graph's mode of fake tensors, which lets constants in."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    fake_mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), FakeTensorMode())
    if fake_mode.shape_env is not None:
        # Numbers that the graph was captured with are tensors by now: TorchInductor would look for whoever made them.
        fake_mode.shape_env.pending_fresh_unbacked_symbols.clear()
    strict = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        with tracing(TracingContext(fake_mode)), _inductor().virtualized.V.set_fake_mode(fake_mode):
            yield
    finally:
        fake_mode.allow_non_fake_inputs = strict


def _decomposed(module: GraphModule) -> GraphModule:
    """The graph in operators that TorchInductor has. Others come after the trace, with padding and with tensors in the
    place of numbers; each is taken apart alone, since a new trace of the whole could find other strides."""
    table, lowerings = _inductor().decomposition.select_decomp_table(), _inductor().lowering.lowerings
    graph = module.graph
    for node in list(graph.nodes):
        if node.target not in table or node.target in lowerings:
            continue
        sources = node.all_input_nodes

        def call(*values: Any, node: Node = node, sources: Sequence[Node] = sources) -> Any:
            found = dict(zip(sources, values, strict=True))
            arguments, keywords = map_arg((node.args, node.kwargs), found.__getitem__)
            return node.target(*arguments, **keywords)  # type: ignore[operator]

        with _inductor().virtualized.V.fake_mode:
            parts = make_fx(call, table)(*(source.meta["val"] for source in sources))
        with graph.inserting_before(node):
            result = graph.graph_copy(parts.graph, dict(zip(graph_inputs(parts), sources, strict=True)))
        if not isinstance(result, Node) or parts.graph.find_nodes(op="get_attr"):
            raise Unsupported("inductor-operator", f"TorchInductor has no kernel for {node.target}")
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    module.recompile()
    return module


def _with_stores(compute: Compute) -> GraphModule:
    """The region's graph, where a result with a destination is copied into one more input instead of returned."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    inputs = graph_inputs(compute.module)
    results = graph_results(compute.module)
    for node in inputs:
        copies[node] = graph.node_copy(node)
    stores: list[tuple[Node, Any]] = []
    returned: list[Any] = []
    for name, value in zip(compute.outputs, results, strict=True):
        if name in compute.destinations:
            assert value is not None
            place = graph.placeholder(f"destination_{len(stores)}")
            fake = value.meta["val"]
            place.meta["val"] = _empty_like(fake, compute.strides_of(name, fake.shape))
            stores.append((place, value))
        else:
            returned.append(value)
    for node in compute.module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for place, value in stores:
        store = graph.call_function(torch.ops.aten.copy_.default, (place, copies[value]))
        store.meta["val"] = place.meta["val"]
    graph.output(tuple(None if value is None else copies[value] for value in returned))
    return GraphModule(compute.module, graph)


def _empty_like(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    with torch.utils._python_dispatch._disable_current_modes(), value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _as_promised(result: Any, strides: tuple[int, ...] | None) -> Any:
    """A result in the requested strides; TorchInductor keeps to their order, but may put gaps between rows."""
    if strides is None or same_strides(result.shape, result.stride(), strides):
        return result
    promised = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    # What is expanded lies in memory once.
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in strides)
    promised[once].copy_(result[once])
    return promised


def _promise_layouts(module: GraphModule, strides: Sequence[tuple[int, ...] | None]) -> None:
    """Asks for results in the strides that they were traced with, on which backward and caller rely."""
    (output,) = module.graph.find_nodes(op="output")
    output.meta["original_output_strides"] = list(strides)
    output.meta["user_visible_output_idxs"] = [
        position for position, stride in enumerate(strides) if stride is not None
    ]
