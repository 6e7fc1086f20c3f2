"""Random numbers of a stage: the very ones that the whole model would have drawn.

Torch's generators are sequences: what a stage draws depends on what earlier stages, and the earlier microbatches of all
stages, have drawn. An export lists each stage's draws, which is little text; a rank repeats those of the others in
memory that it throws away, and so knows the state of the generator at the start of each of its forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.export.targets import find_target, name_of_target
from gradsplit.compile_core.torch_facts.dispatcher import is_random_call

# An operator's name, its arguments, and its keyword arguments. A tensor is {"tensor": [sizes, strides, dtype]}, and a
# number that follows from open sizes {"size": text}.
Draw = list[Any]


class RecordDraws(TorchDispatchMode):
    """Inside, calls of operators that draw random numbers are noted in ``found``.

    Args:
        text: a number that follows from open sizes, as a file has it.
    """

    def __init__(self, text: Callable[[torch.SymInt], int | str]) -> None:
        super().__init__()
        self.found: list[Draw] = []
        self._text = text

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random_call(func, args, kwargs):
            given = {key: value for key, value in kwargs.items() if value is not None}
            if name_of_target(func) is None or tree_any(_is_unwritable, (args, given)):
                raise Unsupported(
                    "pipeline-random",
                    f"{func} draws random numbers in a way that other ranks cannot repeat",
                    "give it no generator of its own",
                )
            self.found.append(
                [
                    name_of_target(func),
                    [self._written(value) for value in args],
                    {key: self._written(value) for key, value in given.items()},
                ]
            )
        return func(*args, **kwargs)

    def _written(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": [self._written(value.shape), self._written(value.stride()), dtype]}
        if isinstance(value, torch.SymInt):
            text = self._text(value)
            return text if isinstance(text, int) else {"size": text}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, (torch.device, torch.layout)):
            return None
        return list(map(self._written, value)) if isinstance(value, (list, tuple)) else value


def _is_unwritable(value: Any) -> bool:
    kinds = (torch.Tensor, torch.dtype, torch.device, torch.layout, torch.SymInt, int, float, bool, str)
    return value is not None and not isinstance(value, kinds)


def with_sizes(draw: Any, value: Callable[[str], int]) -> Any:
    """A draw, or a part of one, with the values of its open sizes."""
    if isinstance(draw, list):
        return [with_sizes(item, value) for item in draw]
    if isinstance(draw, dict):
        if "size" in draw:
            return value(draw["size"])
        return {key: with_sizes(item, value) for key, item in draw.items()}
    return draw


def repeat(draws: Sequence[Draw], device: torch.device) -> None:
    """Moves the generator of ``device`` as these draws do."""
    for name, args, kwargs in draws:
        given = {key: value for key, item in kwargs.items() if (value := _made(item, device)) is not None}
        operator = find_target(name)
        if not any(isinstance(item, dict) and "tensor" in item for item in args):
            given["device"] = device
        operator(*[_made(item, device) for item in args], **given)


def _made(item: Any, device: torch.device) -> Any:
    if not isinstance(item, dict):
        return item
    if "dtype" in item:
        return getattr(torch, item["dtype"])
    sizes, strides, dtype = item["tensor"]
    return torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype), device=device)


def state_of(device: torch.device) -> torch.Tensor:
    """The state of the generator that draws on ``device``."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_state(device: torch.device, state: torch.Tensor) -> None:
    """The inverse of ``state_of``."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def states_of_forwards(
    draws: Sequence[Sequence[Draw]], stages: Sequence[int], microbatches: int, device: torch.device
) -> dict[tuple[int, int], torch.Tensor]:
    """The generator's states at the starts of forwards, by stage and microbatch; it is left as the whole model would
    leave it.

    Args:
        draws: of all stages.
        stages: those whose states are wanted.
    """
    if not any(draws):
        return {}
    states = {}
    with torch.no_grad():
        for microbatch in range(microbatches):
            for stage, drawn in enumerate(draws):
                if stage in stages and drawn:
                    states[stage, microbatch] = state_of(device)
                repeat(drawn, device)
    return states
