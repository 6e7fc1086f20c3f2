"""What keeps torch's front end out of this package, where a program uses it too.

While a function that ``torch.compile`` made runs, torch's front end is shown every Python frame that begins in its
thread, and would compile ours as if they were the user's: the table of entries, a capture, the rounds of a backward.
It is told by code object what not to look at; each way into the package from outside says so of itself. Where it traces
a call of one into a graph of its own, the graph ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from gradsplit.compile_core.torch_facts.private_parts import private

# By which torch's front end knows a function that no graph holds.
DISABLED = "_torchdynamo_disable"
# Its value where only torch's front end is to keep out; it asks whether there is one, and sets ``True`` itself.
_DISABLED_FOR_TORCH = "gradsplit"

_Function = TypeVar("_Function", bound=Callable[..., Any])

_frames = private(
    "torch._C._dynamo:eval_frame",
    "keeping torch.compile out of this package where a program uses both",
    "torch.compile around compiled functions of gradsplit looks into gradsplit itself",
    False,
)
_tracing = private(
    "torch._guards:tracing",
    "torch.cond in graphs of torch.compile",
    "they may run with torch's own kernels",
    lambda context: nullcontext(context),
)
_LEFT_ALONE = _frames and _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def apart_from_torch_compile(function: _Function) -> _Function:
    """A decorator for what a program or autograd's engine calls of this package: neither its frame nor those that begin
    while it runs are shown to torch's front end. A function that ``torch.compile`` made and that is called there is
    compiled by it nevertheless. The capture of this package looks into such functions as into all others."""
    setattr(function, DISABLED, _DISABLED_FOR_TORCH)
    if _frames:
        _frames.set_code_exec_strategy(function.__code__, _LEFT_ALONE)  # type: ignore[attr-defined]
    return function


def outside_of_its_compilation() -> AbstractContextManager[Any]:
    """Inside, torch takes the fake mode of the tensors that it is given, not that of a compilation of torch's front end
    that is under way. Operators that take functions ask for it where they trace these."""
    return _tracing(None)
