"""Gives back the memory of a reducer that is not used: stock DDP's holds a second copy of all gradients.

``DistributedDataParallel`` makes its reducer, with buckets for all gradients, when it is constructed. On the in-graph
way nobody uses it. It is let go, and made again, as for an unpickled module, when anybody asks for it: ``join()``, a
communication hook, logging data, or a method of a later torch. To notice that, the two attributes of the class that
hold it are descriptors from the first time on that a reducer is parked.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

# The logger holds the reducer, too.
_ATTRIBUTES = ("reducer", "logger")


class _Parked:
    """Stands in a module's dictionary for what is made when it is asked for."""


_PARKED = _Parked()


def park_reducer(ddp: DistributedDataParallel) -> None:
    """Lets go of the module's reducer until somebody asks for it; no backward through it may be under way."""
    for name in _ATTRIBUTES:
        if not isinstance(vars(DistributedDataParallel).get(name), _MadeOnDemand):
            setattr(DistributedDataParallel, name, _MadeOnDemand(name))
        vars(ddp)[name] = _PARKED


def is_parked(ddp: DistributedDataParallel) -> bool:
    return ddp.__dict__["reducer"] is _PARKED


class _MadeOnDemand:
    """An attribute that is what the instance's dictionary has, and makes it where that is parked."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, ddp: DistributedDataParallel | None, owner: type) -> Any:
        if ddp is None:
            return self
        if self._name not in ddp.__dict__:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        if ddp.__dict__[self._name] is _PARKED:
            _make(ddp)
        return ddp.__dict__[self._name]

    def __set__(self, ddp: DistributedDataParallel, value: Any) -> None:
        vars(ddp)[self._name] = value

    def __delete__(self, ddp: DistributedDataParallel) -> None:
        vars(ddp).pop(self._name)


def _make(ddp: DistributedDataParallel) -> None:
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()
