"""Calls that a traced graph keeps whole: functions of tensors that stand where operators stand.

The branches of a ``torch.cond`` cannot be laid out in one straight graph, nor can the steps of a loop. Each becomes one
node whose target is a ``KeptCall``. Later stages treat it as an operator of torch's that they have no rule for: a list
of tensors goes in, a list of new ones comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.tensor_spec import TensorSpec, in_memory_order

# While a graph is traced its kept calls are calls of this operator, with a number for each.
_library = torch.library.Library("gradsplit", "DEF")
_library.define("kept_call(Tensor[] inputs, int number) -> Tensor[]")
OPERATOR: Any = torch.ops.gradsplit.kept_call.default


class KeptCall:
    """A function of tensors, as the target of a node.

    Attributes:
        results: the layouts of what it returns; a result in another layout is copied.
        tags: none of torch's, so that nothing is assumed of it.
        depends_on_data: what its function runs may differ between calls.
    """

    tags: tuple[torch.Tag, ...] = ()
    depends_on_data = True
    _schema = OPERATOR._schema

    def __init__(
        self,
        name: str,
        function: Callable[..., Sequence[torch.Tensor]],
        results: Sequence[TensorSpec],
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.function = function
        self.results = tuple(results)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            results = self.function(*inputs)
            return [in_layout(value, spec) for value, spec in zip(results, self.results, strict=True)]

    def example(self) -> list[torch.Tensor]:
        """Tensors like the results."""
        return [spec.empty() for spec in self.results]

    def __str__(self) -> str:
        return self.__name__


def in_layout(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor itself if it has the layout, else a copy that has; of open sizes, dense in its order of dims."""
    if spec.is_open:
        return in_memory_order(value, spec)
    if TensorSpec.of(value) == spec:
        return value
    return spec.empty().copy_(value)
