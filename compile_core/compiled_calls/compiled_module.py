"""A compiled module: the module itself in all but its call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradsplit.compile_core.compiled_calls.state_dict_names import changed_names, with_fitting_names
from gradsplit.compile_core.torch_facts.apart_from_torch_compile import apart_from_torch_compile


class CompiledModule(torch.nn.Module):
    """What ``compile`` makes of a module; see ``wrap_module``."""

    _orig_mod: torch.nn.Module
    _run: Callable[..., Any]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the module's own, also for what was saved through ``torch.compile``'s wrapper or DDP's."""
        if isinstance(state_dict, Mapping):  # anything else is torch's error
            state_dict = with_fitting_names(state_dict, self)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """What torch calls of a part of the module that loads; the dictionary is this call's own."""
        for name, fitting in changed_names(state_dict, self, prefix).items():
            state_dict[fitting] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def wrap_module(module: torch.nn.Module, run: Callable[..., Any]) -> CompiledModule:
    """A module that calls ``run`` and shares everything else with ``module``.

    The two objects have one ``__dict__``: parameters, buffers, submodules, hooks, attributes and the keys of the
    state_dict are the same whichever is used, and methods that return ``self`` return the compiled one. The result is
    also an instance of the module's own class. Pickled, it is the plain module: kernels do not travel.
    """
    plain = type(module)

    @apart_from_torch_compile
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def reduce(self: torch.nn.Module, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _itself, (module,)

    namespace = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_orig_mod": property(lambda self: module),
        "_run": property(lambda self: run),
    }
    compiled_class = type(plain.__name__, (CompiledModule, plain), namespace)
    compiled = object.__new__(compiled_class)
    compiled.__dict__ = module.__dict__
    return compiled


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module
