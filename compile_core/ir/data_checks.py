"""What a graph assumes of numbers that depend on data, and what operators ask of them, checked when it runs.

A check of what is assumed fails before the graph has changed anything that it was given, so the call can be made again
as plain Python. What it has drawn by then, the call draws again: the generators go back to where they were.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.torch_facts.symbolic_numbers import assume

# In a traced graph: an operator that raises with its text where the condition does not hold.
CHECK = torch.ops.aten._assert_scalar.default

_FAILED = "what was assumed of data does not hold"


def check_assumption(condition: Any) -> None:
    """In a captured graph. On fake tensors the condition is assumed.

    Raises:
        RuntimeError: the condition does not hold; ``is_failed_assumption`` knows the error.
    """
    if isinstance(condition, torch.SymBool):
        assume(condition)
    elif not condition:
        raise RuntimeError(_FAILED)


def check_probabilities(numbers: torch.Tensor, text: str) -> None:
    """Has a program that is traced raise a RuntimeError of this text where a number is no probability, as torch's
    kernels for CPUs do. On GPUs, where they end the process, nothing is checked."""
    if numbers.device.type == "cpu":
        torch.ops.aten._assert_async.msg(((numbers >= 0) & (numbers <= 1)).all(), text)


def has_checks(graph: torch.fx.Graph) -> bool:
    """Whether a captured graph checks assumptions."""
    return bool(graph.find_nodes(op="call_function", target=check_assumption))


def text_of_check(condition: str) -> str:
    """The text that a ``CHECK`` of this condition raises with."""
    return f"{_FAILED}: {condition}"


def is_failed_assumption(error: BaseException) -> bool:
    """Whether a graph has raised since what it assumes of data does not hold."""
    return isinstance(error, RuntimeError) and _FAILED in str(error)


def generator_states() -> list[torch.Tensor]:
    """Of torch's generators, the CPU's first: what a failed check goes back to."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpus]


def draw_again(states: list[torch.Tensor]) -> None:
    """Takes the generators back to these states."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
