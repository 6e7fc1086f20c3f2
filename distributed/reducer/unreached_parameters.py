"""Parameters whose gradients stock DDP's reducer would take for zeros, since a graph was compiled.

The reducer's hooks run where autograd's engine comes to a parameter, and an undefined gradient is zeros to them. From a
compiled graph the engine comes to parameters, too, that only results depend on which the loss does not use. In plain
PyTorch the reducer would wait for those, be it in vain: for another backward, or until the next forward is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsplit.distributed.gradients.accumulation_nodes import call_before, node_of, remove_with
from gradsplit.distributed.gradients.paths_of_backward import reached_results
from gradsplit.distributed.gradients.requested_gradients import watch_backwards
from gradsplit.distributed.reducer.wrapped_parameters import looks_for_unused, reduced_parameters


class UnreachedParameters:
    """Makes an error of such gradients.

    Args:
        parameters: those that the reducer reduces, by name.

    Attributes:
        are_errors: the reducer will reduce the next backward, and take them for zeros.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.are_errors = False
        # Nobody else need keep these alive, and hooks go with them.
        self._nodes = {name: node_of(parameter) for name, parameter in parameters.items()}
        remove_with(self, [call_before(node, self._reached, name) for name, node in self._nodes.items()])
        watch_backwards()

    def _reached(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        if not self.are_errors or gradients[0] is not None or reached_results(self._nodes[name]):
            return
        raise RuntimeError(
            f"{name!r} was not used in producing the loss of this backward, and a compiled graph cannot leave it out "
            f"for stock DDP's reducer. Make sure that all results of the module take part in the loss of one backward, "
            f"or pass find_unused_parameters=True to DistributedDataParallel"
        )


_by_module: WeakKeyDictionary[DistributedDataParallel, UnreachedParameters] = WeakKeyDictionary()


def look_at_unreached(ddp: DistributedDataParallel) -> None:
    """A compiled graph runs in a forward of the module with gradients."""
    unreached = _by_module.get(ddp)
    if unreached is None:
        unreached = _by_module[ddp] = UnreachedParameters(reduced_parameters(ddp))
    # One that looks for unused parameters leaves out those whose gradients turn out to be undefined.
    unreached.are_errors = ddp.require_backward_grad_sync and not looks_for_unused(ddp)
