"""Which numbers that depend on data become nodes of the graph.

Reading a number out of a tensor ends the graph, as it does in a user's code, where control flow tends to depend on
it. Some code of torch reads numbers only to compute with them: step counts in optimizers, the number of batches in
the moving averages of a normalisation.
"""

from __future__ import annotations

from gradsplit.compile_core.capture.open_numbers.scalars import compute_scalar, read_scalar
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.tensors import TensorValue, method_rule

_MODULES = ("torch.optim.", "torch.nn.modules.batchnorm")


def reads_scalars(state: CaptureState) -> bool:
    """Whether the code that runs is known to compute with what it reads."""
    return state.calling_module().startswith(_MODULES)


@method_rule("item")
def _item(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    return read_scalar(state, tensor) if reads_scalars(state) and not args and not kwargs else None


@method_rule("__float__")
def _float(state: CaptureState, tensor: TensorValue, *args: Value, **kwargs: Value) -> Value | None:
    return compute_scalar(state, float, [read_scalar(state, tensor)]) if reads_scalars(state) else None
