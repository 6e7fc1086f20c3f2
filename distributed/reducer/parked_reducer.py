"""Gives back the memory of a reducer that is not used: stock DDP's holds a second copy of all gradients.

``DistributedDataParallel`` makes its reducer, with buckets for all gradients, when it is constructed. On the in-graph
way nobody uses it. It is released, and made again, as for an unpickled module, when anybody reads it: ``join()``, a
communication hook, logging data, or a method of a later torch. Copies have one of their own, as all copies do.

To notice that, the class gets attributes of the two names that hold it, when the first reducer is parked. They are
read only where an instance has none of its own, so other modules, and torch's compiler which looks into them, never
meet them.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.torch_facts.patches import is_patched, patch
from gradsplit.distributed.reducer.wrapped_parameters import (
    as_wrapped,
    forget_parameters,
    remember_parameters,
)

# The logger holds the reducer, too.
_ATTRIBUTES = ("reducer", "logger")
_MARK = "_gradsplit_parked_reducer"
_PURPOSE = "memory of stock DDP's buckets, where it does not reduce"


def park_reducer(ddp: DistributedDataParallel) -> None:
    """Releases the module's reducer until somebody reads it; no backward through it may be under way."""
    _prepare_class()
    remember_parameters(ddp)
    attributes = vars(ddp)
    for name in _ATTRIBUTES:
        attributes.pop(name, None)
    attributes[_MARK] = True
    # The next one has yet to rebuild its buckets.
    ddp._has_rebuilt_buckets = False


def park_again(reference: weakref.ref[DistributedDataParallel]) -> None:
    """Releases the reducer that a plain call of the module had made: what autograd accumulates from that call comes
    to whoever reduces the rest, and of one gradient only one can.

    Raises:
        CompileError: the reducer has a communication hook by now, which would be lost.
    """
    ddp = reference()
    if ddp is None or is_parked(ddp) or ddp._join_config.enable:
        return
    if ddp._comm_hooks or has_hook_in_c(ddp):
        raise CompileError(
            "a communication hook was registered between a forward and its backward of a compiled "
            "DistributedDataParallel module; register it before the forward"
        )
    park_reducer(ddp)


def is_parked(ddp: DistributedDataParallel) -> bool:
    return _MARK in vars(ddp)


def has_hook_in_c(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer has one of the built-in communication hooks, in C++. Only its logger knows."""
    if is_parked(ddp) or ddp.logger is None:
        return False
    return ddp.logger._get_ddp_logging_data().strs_map.get("comm_hook", "").startswith("Builtin")


class _MadeOnDemand:
    """What an instance's attribute is made of where it has been parked."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, ddp: DistributedDataParallel | None, owner: type) -> Any:
        if ddp is None:
            return self
        if not is_parked(ddp):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        _make(ddp)
        return vars(ddp)[self._name]


def _prepare_class() -> None:
    if is_patched(DistributedDataParallel, "__getstate__"):
        return
    for name in _ATTRIBUTES:
        patch(DistributedDataParallel, name, _MadeOnDemand(name), _PURPOSE)
    get_state: Any = DistributedDataParallel.__getstate__

    @functools.wraps(get_state)
    def state_without_reducer(self: DistributedDataParallel) -> Any:
        """Leaves the reducer out, of which it hence need not know that it is parked."""
        if not is_parked(self):
            return get_state(self)
        attributes = vars(self)
        attributes.update(dict.fromkeys(_ATTRIBUTES))
        try:
            state = get_state(self)
        finally:
            for name in _ATTRIBUTES:
                del attributes[name]
        del state[_MARK]
        forget_parameters(state)
        return state

    patch(DistributedDataParallel, "__getstate__", state_without_reducer, _PURPOSE)


def _make(ddp: DistributedDataParallel) -> None:
    del vars(ddp)[_MARK]
    ddp.logger = None  # as the constructor has it
    with as_wrapped(ddp):
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    forget_parameters(vars(ddp))
    if ddp.static_graph:
        # What the module has done once for a reducer before this one.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()
