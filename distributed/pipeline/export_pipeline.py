"""``export_pipeline``: a model as stages in a folder, for ``load_stage`` in other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import SplitPoint

from gradsplit.compile_core.export.export_call import export
from gradsplit.compile_core.export.exported import Exported
from gradsplit.distributed.pipeline.balance import cut_evenly
from gradsplit.distributed.pipeline.example_inputs import example_call
from gradsplit.distributed.pipeline.export_folder import write_pipeline
from gradsplit.distributed.pipeline.graph_facts import GraphFacts, examine
from gradsplit.distributed.pipeline.layout import PipelineLayout
from gradsplit.distributed.pipeline.node_costs import (
    bytes_across_cuts,
    bytes_of_nodes,
    parameters_of_nodes,
    seconds_of_nodes,
)
from gradsplit.distributed.pipeline.piece_costs import seconds_as_compiled, seconds_of_loss
from gradsplit.distributed.pipeline.split_graph import split_graph

# What a byte that is sent costs, in the unit of each balance: seconds at 10 GB/s, bytes, parameters.
_PER_BYTE_SENT = {"time": 1e-10, "memory": 1.0, "parameters": 0.25}


def export_pipeline(
    model: Any,
    example_args: Sequence[Any],
    num_stages: int | None = None,
    *,
    folder: str | os.PathLike[str],
    example_kwargs: Mapping[str, Any] | None = None,
    balance: str | Sequence[str] | Mapping[str, SplitPoint] = "time",
    microbatches: int | None = None,
    loss: tuple[Callable[[Any, Any], torch.Tensor], Any] | None = None,
    dynamic_shapes: Any = None,
    strict: bool = True,
) -> PipelineLayout:
    """Captures one whole graph of a model and writes it in stages.

    Args:
        model: a module, or what ``gradsplit.export`` has returned. Parameters may be on the meta device.
        example_args, example_kwargs: a call with one microbatch. Its sizes are those of each later microbatch, but for
            those that are left open, and those with which all is measured.
        num_stages: how many; not needed where ``balance`` names the cuts.
        folder: to write to; it appears as a whole or not at all.
        balance: what of the greatest stage is to be least: "time", measured with torch's kernels, and on a GPU with the
            generated ones, "memory", what a
            stage holds and keeps for the microbatches in flight, or "parameters"; or where to cut: names of submodules
            with which a stage begins, or a dictionary of these to ``SplitPoint``, as torch's ``pipeline`` takes it.
        microbatches: how many are in flight at the most, for "memory"; as many as stages by default.
        loss: the ``loss_fn`` that the schedule will call with the model's result, and the target of one microbatch,
            so that its time counts in the balance of "time".
        dynamic_shapes: which sizes may differ between steps; see ``gradsplit.export``.
        strict: see there.

    Returns:
        What the stages are, and how they hang together.

    Raises:
        Unsupported: the model is not one graph, with the user's line.
        ValueError: it cannot be cut so; or ``dynamic_shapes`` comes too late, since ``model`` was exported before.
        CompileError: a size that is to differ cannot.
        FileExistsError: there is something at ``folder``.
    """
    if os.path.exists(folder):
        raise FileExistsError(f"{folder} exists; a pipeline is exported to a folder of its own")
    if isinstance(model, Exported) and dynamic_shapes is not None:
        raise ValueError(
            f"{model.name} is exported, with the sizes that were left open then; give dynamic_shapes to "
            f"gradsplit.export"
        )
    exported = (
        model
        if isinstance(model, Exported)
        else export(model, tuple(example_args), example_kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
    )
    facts = examine(exported)
    if isinstance(balance, str):
        if balance not in _PER_BYTE_SENT:
            raise ValueError(
                f"balance is {', '.join(map(repr, _PER_BYTE_SENT))}, or names of submodules, not {balance!r}"
            )
        if num_stages is None or num_stages < 1:
            raise ValueError(f"num_stages is a positive number, not {num_stages!r}")
        if num_stages > len(facts.cuts) + 1:
            raise ValueError(_too_many(exported.name, num_stages, facts))
    has_data = not any(tensor.is_meta for tensor in exported.tensors.values())
    # What is timed draws random numbers, which are not the program's.
    with torch.random.fork_rng([exported.device] if has_data and exported.device != "cpu" else []):
        call = example_call(exported, example_args, example_kwargs or {}) if has_data else []
        seconds = seconds_of_nodes(exported, facts, call)
        if balance == "time" and num_stages != 1 and exported.device != "cpu" and has_data:
            # Generated kernels leave out most of what torch's launch and move on a GPU beside the products.
            seconds = seconds_as_compiled(exported, facts, call, seconds, num_stages or 1)
        if loss is not None and has_data:
            seconds[-1] += seconds_of_loss(exported, call, *loss)
    in_flight = microbatches or num_stages or 1
    if isinstance(balance, str):
        assert num_stages is not None
        costs = {
            "time": lambda: seconds,
            "memory": lambda: bytes_of_nodes(exported, facts, in_flight),
            "parameters": lambda: parameters_of_nodes(exported, facts),
        }[balance]()
        sent = [_PER_BYTE_SENT[balance] * count for count in bytes_across_cuts(facts)]
        cuts = cut_evenly(costs, facts.cuts, num_stages, sent)
    else:
        cuts = _cuts_at(facts, balance)
        if num_stages not in (None, len(cuts) + 1):
            raise ValueError(f"{len(cuts)} split points make {len(cuts) + 1} stages, not {num_stages}")
    split = split_graph(exported, facts, cuts, seconds, in_flight)
    write_pipeline(folder, split)
    return split.layout


def _too_many(name: str, num_stages: int, facts: GraphFacts) -> str:
    why = (
        f"; most of it cannot be cut, since {next(iter(facts.forbidden.values()))}" if facts.forbidden else ""
    )
    return f"{name} can be cut into {len(facts.cuts) + 1} stages at the most, not {num_stages}{why}"


def _cuts_at(facts: GraphFacts, points: Sequence[str] | Mapping[str, SplitPoint]) -> tuple[int, ...]:
    named = points if isinstance(points, Mapping) else dict.fromkeys(points, SplitPoint.BEGINNING)
    cuts = []
    for name, point in named.items():
        inside = [
            position
            for position, node in enumerate(facts.nodes)
            if f"{node.meta.get('module', '')}.".startswith(f"{name}.") and node not in facts.constant
        ]
        if not inside:
            known = sorted({node.meta.get("module", "") for node in facts.nodes} - {""})
            raise ValueError(f"no submodule {name!r} computes anything; there are {', '.join(known[:20])}")
        position = inside[0] if point is SplitPoint.BEGINNING else inside[-1] + 1
        if position in (0, len(facts.nodes)):
            raise ValueError(f"a cut at {name!r} leaves nothing on one side of it")
        if position in facts.forbidden:
            raise ValueError(f"the model cannot be cut at {name!r}: {facts.forbidden[position]}")
        cuts.append(position)
    if len(set(cuts)) != len(cuts):
        raise ValueError("two split points are the same place")
    return tuple(sorted(cuts))
