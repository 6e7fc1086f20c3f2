"""How the stages of a pipeline hang together: data that a manifest holds and every rank reads.

A value that leaves its stage is an edge: it goes straight from the stage that makes it to each stage that reads it. Its
gradient goes the other way from reader to reader: the last one sends what it has to the one before, which adds its own,
as autograd's engine adds up the uses of a value, from the last to the first. So the sum is that of the unsplit model.
A parameter that several stages read is an edge, too: the first one owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from gradsplit.compile_core.export.conditions import ExportedTensor, compile_condition
from gradsplit.compile_core.export.structures import Structure, build
from gradsplit.distributed.pipeline.draws import Draw, with_sizes


@dataclass(frozen=True)
class Edge:
    """A value that goes from stage to stage.

    Attributes:
        name: of the node that makes it, or of the parameter.
        producer: the stage that has it.
        consumers: the stages that read it, in order.
        sizes, strides, dtype: of what is sent. What differs between steps is text over the call; see
            ``PipelineLayout.at``.
        requires_grad: a gradient comes back.
        is_state: a parameter or a buffer, which is sent once a step.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: str
    requires_grad: bool
    is_state: bool = False

    @staticmethod
    def read(data: dict[str, Any]) -> Edge:
        """The inverse of ``dataclasses.asdict``."""
        tuples = {key: tuple(data[key]) for key in ("consumers", "sizes", "strides")}
        return Edge(**{**data, **tuples})

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for it, as it is sent: flat."""
        return torch.empty(self.numel, dtype=self.torch_dtype, device=device)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as it is sent."""
        if tensor.stride() != self.strides:
            tensor = torch.empty_strided(
                self.sizes, self.strides, dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.detach().as_strided((self.numel,), (1,))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of ``flat``."""
        return flat.as_strided(self.sizes, self.strides)

    def is_sent_by(self, stage: int) -> bool:
        """Whether a stage makes it, for each microbatch."""
        return self.producer == stage and not self.is_state

    def reader_before(self, stage: int) -> int:
        """Where a stage that reads it sends its gradient."""
        return max((reader for reader in self.consumers if reader < stage), default=self.producer)

    def reader_after(self, stage: int) -> int | None:
        """From where a stage gets its gradient, if from anywhere."""
        return min((reader for reader in self.consumers if reader > stage), default=None)


@dataclass(frozen=True)
class StageLayout:
    """What a stage takes and gives.

    Attributes:
        inputs: of each input of its graph the position of an edge, or below zero that of an argument of the call: -1
            the first, -2 the second.
        outputs: of each result of its graph the edge that is sent, or whose gradient is led through it (see
            ``threaded``); empty for the last stage, whose results are the model's.
        measured: of the inputs, those arguments of the call of which only the sizes are read; they need no data.
        threaded: positions of edges that the stage takes and reads several times, and that later stages read, too: its
            graph returns a copy, so that their gradient is the first to be added.
        draws: of random numbers, by a forward.
        seconds: of a microbatch's forward and backward, as measured or estimated when it was cut.
        state_bytes, kept_bytes: of parameters and buffers, and of what a microbatch's values take at the most.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    measured: tuple[int, ...]
    threaded: tuple[int, ...]
    draws: tuple[Draw, ...]
    seconds: float
    state_bytes: int
    kept_bytes: int

    @staticmethod
    def read(data: dict[str, Any]) -> StageLayout:
        """The inverse of ``dataclasses.asdict``."""
        keys = ("inputs", "outputs", "measured", "threaded", "draws")
        return StageLayout(**{**data, **{key: tuple(data[key]) for key in keys}})


@dataclass(frozen=True)
class PipelineLayout:
    """All stages of an exported model.

    Attributes:
        name: of the model.
        identity: of this export, in which no other one's stages take part.
        call, parameter_names, arguments, conditions: of the model; see ``Exported``.
        state_names: names of all entries of the model's ``state_dict``, in its order.
        microbatches: how many are in flight at the most.
    """

    name: str
    identity: str
    stages: tuple[StageLayout, ...]
    edges: tuple[Edge, ...]
    call: Structure
    parameter_names: tuple[str, ...]
    arguments: tuple[ExportedTensor, ...]
    conditions: tuple[str, ...]
    state_names: tuple[str, ...]
    microbatches: int

    @property
    def open_arguments(self) -> tuple[int, ...]:
        """The positions of those arguments that a stage reads, and whose sizes may differ between steps."""
        read = sorted({-1 - k for stage in self.stages for k in stage.inputs if k < 0})
        return tuple(position for position in read if self.arguments[position].open_dims)

    @property
    def example_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arguments in the call that was exported."""
        return tuple(argument.example for argument in self.arguments)

    def at(self, shapes: Sequence[Sequence[int]]) -> PipelineLayout:
        """The same for a microbatch whose arguments have these shapes: there are no texts in it.

        Raises:
            ValueError: a text is none over the call.
        """
        args, kwargs = self._call_with(shapes)

        def value(size: int | str) -> int:
            return size if isinstance(size, int) else compile_condition(size)(args, kwargs)

        edges = (
            replace(edge, sizes=tuple(map(value, edge.sizes)), strides=tuple(map(value, edge.strides)))
            for edge in self.edges
        )
        stages = (
            replace(stage, draws=tuple(with_sizes(draw, value) for draw in stage.draws))
            for stage in self.stages
        )
        return replace(self, edges=tuple(edges), stages=tuple(stages))

    def broken_condition(self, shapes: Sequence[Sequence[int]]) -> str:
        """What must hold of the sizes of a call and does not hold of these, or ""."""
        args, kwargs = self._call_with(shapes)
        return next((text for text in self.conditions if not compile_condition(text)(args, kwargs)), "")

    def _call_with(self, shapes: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Arguments of these shapes for the texts, which read nothing else of them."""
        return build(self.call, [SimpleNamespace(shape=tuple(shape)) for shape in shapes])

    def as_data(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)

    @staticmethod
    def read(data: Mapping[str, Any]) -> PipelineLayout:
        """The inverse of ``as_data``."""
        return PipelineLayout(
            **{
                **data,
                "stages": tuple(map(StageLayout.read, data["stages"])),
                "edges": tuple(map(Edge.read, data["edges"])),
                "parameter_names": tuple(data["parameter_names"]),
                "arguments": tuple(map(ExportedTensor.read, data["arguments"])),
                "conditions": tuple(data["conditions"]),
                "state_names": tuple(data["state_names"]),
            }
        )
