"""Steps an optimizer for some of its parameters at a time.

A part is an object of the optimizer's class with its attributes and its state, whose groups have the hyperparameters
that the optimizer's groups have now, but only some parameters. So schedulers, ``state_dict`` and ``load_state_dict``
are the optimizer's as ever, and whatever computes each parameter's step for itself computes the same bits.

An optimizer for which that does not hold is refused: before the first step where its class shows it, else in the first
round, as one that changes parameters it was not given, or counts steps elsewhere than in the parameters' state.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.utils.hooks import RemovableHandle

from gradsplit.compile_core.torch_facts.optimizers import global_post_hooks, global_pre_hooks, note_step

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# By which a GradScaler sees whether an optimizer takes scaled gradients.
_TAKES_SCALED = "_step_supports_amp_scaling"


class PartialOptimizer:
    """
    Args:
        optimizer: until it is given back, a call of its ``step`` is an error.
        parameters: those that may be given to ``step``, by name.

    Raises:
        ValueError: it is no optimizer that can be stepped in parts, or has other parameters that are trained.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._optimizer = optimizer
        self._refuse_class()
        self._known = frozenset(map(id, parameters.values()))
        self._refuse_foreign(ValueError)
        self._handle: RemovableHandle | None = None
        self._took_scaled: Any = None
        self._take()
        self._group_of: dict[int, int] = {}
        self._is_checked = False

    def _take(self) -> None:
        if self._handle is not None:
            return
        optimizer = self._optimizer
        self._handle = optimizer.register_step_pre_hook(_refuse_call)
        self._took_scaled = vars(optimizer).get(_TAKES_SCALED)
        # Else a GradScaler would not call it where gradients are infinite, and nobody would hear of the mistake.
        setattr(optimizer, _TAKES_SCALED, True)

    def give_back(self) -> None:
        """The program may call the optimizer's ``step`` again, until a round begins."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._took_scaled is None:
            delattr(self._optimizer, _TAKES_SCALED)
        else:
            setattr(self._optimizer, _TAKES_SCALED, self._took_scaled)

    def begin_round(self) -> None:
        """Called before the steps of one backward.

        Raises:
            RuntimeError: the optimizer has hooks on its step, or by now parameters that the module does not reduce.
        """
        self._take()
        optimizer = self._optimizer
        hooks = [hook for name in _HOOKS for hook in getattr(optimizer, name).values()]
        for of_all in (global_pre_hooks, global_post_hooks):
            hooks += of_all.values()
        if any(hook not in (_refuse_call, note_step) for hook in hooks):
            raise RuntimeError(
                f"{type(optimizer).__name__} has hooks on its step, but with step_in_backward there is no step of all "
                "its parameters at once: remove the hooks, or call optimizer.step() without step_in_backward"
            )
        self._refuse_foreign(RuntimeError)
        self._group_of = {
            id(given): k for k, group in enumerate(optimizer.param_groups) for given in group["params"]
        }

    def has(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) in self._group_of

    def step(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """One step of these parameters, those of them that are the optimizer's."""
        members: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if self.has(parameter):
                members.setdefault(self._group_of[id(parameter)], []).append(parameter)
        if not members:
            return
        groups = self._optimizer.param_groups
        part = self._part([{**groups[k], "params": given} for k, given in members.items()])
        versions = [] if self._is_checked else self._versions()
        type(self._optimizer).step(part)
        if not self._is_checked:
            self._check(part, [groups[k] for k in members], versions)

    def end_round(self) -> None:
        self._is_checked = True
        # What schedulers look for, to tell whether they are stepped in the right order.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _part(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        part = object.__new__(type(self._optimizer))
        part.__dict__.update(self._optimizer.__dict__)
        part.__dict__.update({name: OrderedDict() for name in _HOOKS}, param_groups=groups)
        return part

    def _versions(self) -> list[tuple[torch.nn.Parameter, int]]:
        return [
            (given, given._version) for group in self._optimizer.param_groups for given in group["params"]
        ]

    def _check(
        self,
        part: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        versions: list[tuple[torch.nn.Parameter, int]],
    ) -> None:
        """Raises RuntimeError if the step did anything that does not belong to the part."""
        given = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        if any(
            parameter._version != version for parameter, version in versions if id(parameter) not in given
        ):
            raise self._refusal("changes parameters that it was not given, when it is stepped in parts")
        for mine, group in zip(part.param_groups, groups, strict=True):
            for key, value in mine.items():
                if key != "params" and value is not group.get(key):
                    raise self._refusal(f"changes {key!r} of its groups at every step")
        before = self._optimizer.__dict__
        for key, value in part.__dict__.items():
            if key not in ("param_groups", *_HOOKS) and before.get(key) is not value:
                if not isinstance(value, bool):
                    raise self._refusal(f"changes its attribute {key!r} at every step")
                before[key] = value

    def _refuse_foreign(self, kind: type[Exception]) -> None:
        known = self._known
        foreign = sum(
            id(given) not in known and given.requires_grad
            for group in self._optimizer.param_groups
            for given in group["params"]
        )
        if foreign:
            raise kind(
                f"{foreign} parameters of the optimizer in step_in_backward are none whose gradients the module "
                "reduces, as those that were frozen when the DistributedDataParallel module was made: give them an "
                "optimizer of their own, which you step"
            )

    def _refuse_class(self) -> None:
        optimizer = self._optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"step_in_backward takes a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        if isinstance(optimizer, Joinable):  # as torch's ZeroRedundancyOptimizer
            raise self._refusal("has collectives in its step", ValueError)
        arguments = inspect.signature(type(optimizer).step).parameters
        closure = arguments.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise self._refusal("evaluates the loss itself", ValueError)
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise self._refusal("is differentiable", ValueError)

    def _refusal(self, why: str, kind: type[Exception] = RuntimeError) -> Exception:
        return kind(
            f"{type(self._optimizer).__name__} {why}, so its step cannot be made bucket by bucket: call "
            "optimizer.step() without step_in_backward"
        )


def _refuse_call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise RuntimeError(
        f"{type(optimizer).__name__}.step() was called, but DDPOptions(step_in_backward=...) has made that step in the "
        "backward already: leave the call out. What must happen between gradients and step, as clipping or the "
        "unscaling of a GradScaler, needs a compilation without step_in_backward"
    )
