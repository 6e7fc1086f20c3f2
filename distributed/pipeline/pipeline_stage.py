"""``CompiledStage``: a stage of an exported pipeline, as torch's schedules drive it.

Torch's schedules send values from a stage to the next one, and gradients back. That part is left to torch's
``PipelineStage``, which is given flat tensors; what goes further, weights that several stages read, random numbers and
the three programs are here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from gradsplit.compile_core.export.exported import Exported
from gradsplit.compile_core.export.structures import build
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.torch_facts.autograd_engine import backward_from
from gradsplit.compile_core.torch_facts.pipelining import StageOfRanks, start_messages
from gradsplit.distributed.pipeline.call_arguments import read_call
from gradsplit.distributed.pipeline.layout import Edge, PipelineLayout
from gradsplit.distributed.pipeline.mail import BACKWARD, FORWARD, Lane, Message
from gradsplit.distributed.pipeline.rank_step import RankStep
from gradsplit.distributed.pipeline.replicas import ReplicaAverages
from gradsplit.distributed.pipeline.stage_programs import StageProgram, WeightGradients


@dataclass(frozen=True)
class _Forward:
    """What a forward leaves for its backward."""

    inputs: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]


class CompiledStage(StageOfRanks):
    """A stage for torch's schedules; see ``load_stage``.

    Attributes:
        layout: of the whole pipeline.
        submod: holds the stage's parameters and buffers under the model's names; it is no module to be called.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        stage: int,
        part: Exported,
        device: torch.device,
        request: CompileRequest,
        group: dist.ProcessGroup | None,
        step: RankStep,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        self.layout, self._step, self._result = layout, step, part.result
        own, edges = layout.stages[stage], step.layout.edges
        self._inputs, self._outputs, self._threaded = own.inputs, own.outputs, frozenset(own.threaded)
        # In the place of arguments of which only the sizes are read: nothing of their data is.
        self._stand_ins = {
            k: torch.empty((), dtype=layout.arguments[-1 - k].torch_dtype, device=device)
            for k in own.measured
        }
        self._sent = [k for k, edge in enumerate(edges) if edge.is_sent_by(stage)]
        # In one order on both sides.
        self._to_next = [k for k in self._sent if stage + 1 in edges[k].consumers]
        self._from_previous = sorted(k for k in own.inputs if k >= 0 and edges[k].is_sent_by(stage - 1))
        super().__init__(
            part.module(),
            stage,
            len(layout.stages),
            device,
            input_args=tuple(_described(edges[k]) for k in self._from_previous),
            output_args=tuple(_described(edges[k]) for k in self._to_next),
            group=group,
        )
        placeholders = part.graph.find_nodes(op="placeholder")
        is_weight = [node.meta["kind"] == "parameter" for node in placeholders]
        open_dims = {
            k: part.arguments[node.meta["path"]].open_dims
            for k, node in enumerate(placeholders)
            if node.meta["kind"] == "argument"
        }
        self._program = StageProgram(part.graph, is_weight, request, open_dims)
        # By microbatch, what is on its way since sizes are known.
        self._receiving: dict[int, list[dist.Work]] = {}
        # Weights of other stages that this one reads, and its own that others read: leaves of their own, since the
        # gradient of each microbatch goes to the owner, and is added up there, before it is accumulated.
        self._borrowed = {
            k: edges[k].shaped(edges[k].empty(device)).requires_grad_(edges[k].requires_grad)
            for k in own.inputs
            if k >= 0 and edges[k].is_state
        }
        self._lent: dict[int, torch.Tensor] = {
            k: self.submod.get_parameter(edge.name)
            for k, edge in enumerate(edges)
            if edge.is_state and edge.producer == stage
        }
        lent_names = {edges[k].name: k for k in self._lent}
        # What the program takes: whose it is, and under which name.
        self._sources: list[tuple[Any, Any]] = []
        for node in placeholders:
            kind, path = node.meta["kind"], node.meta["path"]
            if kind == "argument":
                self._sources.append((None, path))
            elif kind == "constant":
                self._sources.append((part.tensors, path))
            elif path in lent_names:
                self._sources.append((self._lent, lent_names[path]))
            else:
                module, _, name = path.rpartition(".")
                owner = self.submod.get_submodule(module)
                table = owner._buffers if kind == "buffer" else owner._parameters
                self._sources.append((table, name))
        self._forwards: dict[int, _Forward] = {}
        self._weights: dict[int, list[WeightGradients]] = {}
        # By lent weight and microbatch, the gradient that comes from those who read it, if no program adds it.
        self._owed: dict[tuple[int, int], torch.Tensor] = {}
        self._averages = (
            None if replicas is None else ReplicaAverages(dict(self.submod.named_parameters()), replicas)
        )
        self._scale = 1
        self._wants_split = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The stage's parameters and buffers under the model's names; see ``merge_checkpoints``."""
        return self.submod.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes its own from the whole model's ``state_dict``, or from a stage's of the same parts.

        Raises:
            ValueError: something is missing.
        """
        wanted = self.submod.state_dict()
        missing = [name for name in wanted if name not in state]
        if missing:
            raise ValueError(f"the checkpoint has no {missing[0]}, which stage {self.stage_index} needs")
        taken = {name: state[name] for name in wanted}
        if any(tensor.is_meta for tensor in wanted.values()):
            # Exported without data: what is loaded takes the place of what only has a shape.
            taken = {name: tensor.to(self.device, copy=True) for name, tensor in taken.items()}
            self.submod.load_state_dict(taken, assign=True)
        else:
            self.submod.load_state_dict(taken)

    # What torch's schedules call.

    def clear_runtime_states(self) -> None:
        """A step begins.

        Raises:
            ValueError: the stage has no data yet.
        """
        for name, tensor in self.submod.state_dict().items():
            if tensor.is_meta:
                raise ValueError(
                    f"{name} of stage {self.stage_index} was exported without data; call load_state_dict first"
                )
        super().clear_runtime_states()
        if self._wants_split:
            self._program.backward.split()
        self._step.begin(self)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What is to be received of a microbatch; nothing where its size is not known yet, see ``RankStep``."""
        if self._step.has_sizes:
            return super().get_fwd_recv_ops(fwd_chunk_id)
        self._step.postpone(self, fwd_chunk_id)
        return []

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward of a microbatch: what the next stage takes, or of the last stage the model's result."""
        if self._step.begin_forwards(len(self.args_recv_info), args, kwargs or {}):
            self._step.exchange_weights()
        for work in self._receiving.pop(fwd_chunk_id, ()):
            work.wait()
        self._program.backward.in_flight = len(self.args_recv_info)
        inputs = self._received(fwd_chunk_id, args, kwargs or {})
        grad_mode = nullcontext() if self.has_backward else torch.no_grad()
        with self._step.random_numbers(self.stage_index, fwd_chunk_id), grad_mode:
            results = self._program(self._given(inputs))
        if self.has_backward:
            self._forwards[fwd_chunk_id] = _Forward(inputs, results)
        if self.is_last:
            output = build(self._result, results)
            if save_forward_output:
                self.output_chunks.append(output)
            self.fwd_cache[fwd_chunk_id] = ((), [])
            return output
        edges = self._step.layout.edges
        flat = {k: edges[k].flat(value) for k, value in zip(self._sent, results, strict=False)}
        for k in self._sent:
            for reader in edges[k].consumers:
                if reader != self.stage_index + 1:
                    self._send(FORWARD, k, fwd_chunk_id, flat[k], reader)
        to_next = tuple(flat[k] for k in self._to_next)
        self.fwd_cache[fwd_chunk_id] = (to_next, [])  # type: ignore[assignment]
        return to_next

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The gradients of a microbatch's inputs, and with ``full_backward`` those of weights, too."""
        if not self.has_backward:
            return
        forward = self._forwards.pop(bwd_chunk_id)
        self.fwd_cache.pop(bwd_chunk_id)
        roots, seeds = ([loss], [None]) if self.is_last else self._arrived(bwd_chunk_id, forward)
        backward = self._program.backward
        self._wants_split |= not full_backward
        backward.in_two = not full_backward
        torch.autograd.backward(roots, seeds)
        self._weights[bwd_chunk_id] = backward.take_weights()
        gradients: dict[int, torch.Tensor] = {}
        edges = self._step.layout.edges
        for k, leaf in zip(self._inputs, forward.inputs, strict=True):
            if k < 0 or not edges[k].requires_grad:
                continue
            edge = edges[k]
            gradients[k] = edge.flat(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        for k in sorted(gradients.keys() - set(self._from_previous)):
            reader = edges[k].reader_before(self.stage_index)
            self._send(BACKWARD, k, bwd_chunk_id, gradients[k], reader)
        self.bwd_cache[bwd_chunk_id] = tuple(gradients.get(k) for k in self._from_previous)
        if full_backward:
            self.backward_weight_one_chunk(bwd_chunk_id, last_backward)
        elif not self._weights[bwd_chunk_id]:
            # As in the first step: nothing was left.
            self._finish_weights(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients of weights that ``backward_one_chunk`` has left."""
        if not self.has_backward:
            return
        if bwd_chunk_id in self._weights:
            self._finish_weights(bwd_chunk_id)
        if last_backward and self._averages is not None:
            self._averages.start()

    def _finish_weights(self, microbatch: int) -> None:
        for left in self._weights.pop(microbatch):
            left.run()
        for k, leaf in self._lent.items():
            gradient, leaf.grad = leaf.grad, None
            theirs = self._owed.pop((k, microbatch), None)
            if theirs is not None:
                gradient = theirs if gradient is None else theirs + gradient
            if gradient is not None:
                parameter = self.submod.get_parameter(self.layout.edges[k].name)
                backward_from([get_gradient_edge(parameter)], [gradient])

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All backwards of the stage have run; when those of the rank's stages have, its gradients are complete."""
        self._scale = grad_scale_factor
        self._step.finish(self)

    # What the rank's step calls.

    def take_sizes(self) -> None:
        """Torch's buffers are for messages of other sizes from here on."""
        edges = self._step.layout.edges
        received = [
            *(zip(self._from_previous, infos, strict=True) for infos in self.args_recv_info.values()),
            *(zip(self._to_next, infos, strict=True) for infos in self.grad_recv_info.values()),
        ]
        for k, info in itertools.chain(*received):
            if info.buffer is not None and info.buffer.numel() != edges[k].numel:
                info.buffer = edges[k].empty(self.device)

    def start_receiving(self, microbatch: int) -> None:
        """Asks for a microbatch that the schedule wanted to receive before."""
        self._receiving[microbatch] = start_messages(super().get_fwd_recv_ops(microbatch))

    def exchange_weights(self, send: bool) -> None:
        """Sends the weights that others read, or takes those of others."""
        edges = self._step.layout.edges
        if send:
            for k in self._lent:
                leaf = self.submod.get_parameter(edges[k].name).detach()
                self._lent[k] = leaf.requires_grad_(edges[k].requires_grad)
                for reader in edges[k].consumers:
                    self._send(FORWARD, k, 0, edges[k].flat(leaf), reader)
            return
        with torch.no_grad():
            for k, leaf in sorted(self._borrowed.items()):
                leaf.copy_(edges[k].shaped(self._receive(FORWARD, k, 0, edges[k].producer)))

    def complete_gradients(self) -> None:
        """Waits for those of replicas, and divides them as the schedule asked for."""
        if self.has_backward:
            if self._averages is not None:
                self._averages.finish()
            self.scale_grads(self._scale)

    # Inputs and gradients.

    def _given(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the program takes."""
        return [inputs[key] if table is None else table[key] for table, key in self._sources]

    def _received(
        self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """The inputs of a microbatch: of the call, of other stages, and of weights of theirs.

        Raises:
            ValueError: the call lacks one, or has one of another size than the step's first microbatch.
        """
        edges, stage = self._step.layout.edges, self.stage_index
        infos = self.args_recv_info[microbatch]
        arrived: dict[int, Any] = {k: info.buffer for k, info in zip(self._from_previous, infos, strict=True)}
        for k in sorted(self._inputs):
            if k >= 0 and k not in self._borrowed and k not in self._from_previous:
                arrived[k] = self._receive(FORWARD, k, microbatch, edges[k].producer)
        reads_call = any(k < 0 and k not in self._stand_ins for k in self._inputs)
        call = read_call(self.layout, args, kwargs) if reads_call else {}
        inputs = []
        for k in self._inputs:
            if k in self._stand_ins:
                inputs.append(self._stand_ins[k].expand(self._step.shapes[-1 - k]))
            elif k < 0:
                argument, shape = self.layout.arguments[-1 - k], self._step.shapes[-1 - k]
                given = call.get(-1 - k)
                if given is None:
                    raise ValueError(
                        f"stage {stage} reads {argument.place} of the model's call; give it to step() on this rank, too"
                    )
                if given.shape != shape:
                    raise ValueError(
                        f"{argument.place} has the shape {list(given.shape)} in microbatch {microbatch}, and "
                        f"{list(shape)} in the first one; all microbatches of a step have one size, so give a batch "
                        f"that {len(self.args_recv_info)} divides"
                    )
                inputs.append(given)
            elif k in self._borrowed:
                inputs.append(self._borrowed[k])
            else:
                leaf = edges[k].shaped(arrived[k].detach())
                inputs.append(leaf.requires_grad_(edges[k].requires_grad and self.has_backward))
        return inputs

    def _arrived(
        self, microbatch: int, forward: _Forward
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The values whose gradients come from later stages, and these."""
        edges, stage = self._step.layout.edges, self.stage_index
        values: list[tuple[int, torch.Tensor | None]] = [*zip(self._outputs, forward.results, strict=True)]
        values += [
            (k, leaf)
            for k, leaf in zip(self._inputs, forward.inputs, strict=True)
            if k >= 0 and k not in self._threaded
        ]
        values += [(k, None) for k in sorted(self._lent.keys() - self._threaded)]
        readers = {k: edges[k].reader_after(stage) for k, _ in values if edges[k].requires_grad}
        infos = self.grad_recv_info[microbatch]
        arrived = {k: info.buffer for k, info in zip(self._to_next, infos, strict=True)}
        for k, reader in sorted(readers.items()):
            if reader is not None and k not in arrived:
                arrived[k] = self._receive(BACKWARD, k, microbatch, reader)
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor | None] = []
        for k, value in values:
            if readers.get(k) is None:
                continue
            if value is None:
                self._owed[k, microbatch] = edges[k].shaped(arrived[k])
            else:
                roots.append(value)
                seeds.append(edges[k].shaped(arrived[k]))
        return roots, seeds

    # Messages.

    def _send(self, kind: int, edge: int, microbatch: int, flat: torch.Tensor, reader: int) -> None:
        message = Message(Lane(kind, self.stage_index, reader), edge, microbatch)
        self._step.mail.send(message, flat, self.stage_index_to_group_rank[reader])

    def _receive(self, kind: int, edge: int, microbatch: int, sender: int) -> torch.Tensor:
        message = Message(Lane(kind, sender, self.stage_index), edge, microbatch)
        rank = self.stage_index_to_group_rank[sender]
        empty = self._step.layout.edges[edge].empty
        return self._step.mail.receive(message, lambda: empty(self.device), rank)


def _described(edge: Edge) -> torch.Tensor:
    """A tensor that looks like what is sent, without data."""
    return torch.empty(edge.numel, dtype=edge.torch_dtype, device="meta", requires_grad=edge.requires_grad)
