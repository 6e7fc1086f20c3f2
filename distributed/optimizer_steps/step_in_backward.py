"""Optimizer steps under the backward: a bucket's parameters are updated as soon as its gradients are averaged.

A parameter may be updated when nothing later in this backward reads it. For one whose gradient comes from compiled
programs alone, the programs tell (``parameter_readers``): all that contribute to its gradient have done so when its
bucket is reduced, and the one that runs says what it still reads. All others are stepped at the end of the round.
What reads a parameter without that, as code between graphs that detaches it, finds it changed, which is torch's
usual error.

On a GPU the steps run on a stream of their own, after their collectives and after whatever was computed until then;
the end of the backward waits for it. On the CPU a bucket is stepped when gradients arrive and its collective is found
done, so the backward is never blocked.

One backward is one step. Nothing is stepped under ``no_sync()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from gradsplit.distributed.collectives.averaging import Work
from gradsplit.distributed.optimizer_steps.parameter_readers import ParameterReaders
from gradsplit.distributed.optimizer_steps.partial_optimizer import PartialOptimizer
from gradsplit.distributed.streams import current_stream


class StepInBackward:
    """Follows the rounds of a module.

    Args:
        optimizer: what is stepped.
        parameters: those of the buckets, by name.
        on_streams: see ``Averaging``.
    """

    def __init__(
        self, optimizer: PartialOptimizer, parameters: Mapping[str, torch.nn.Parameter], on_streams: bool
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._device = next(iter(parameters.values())).device
        self._stream = torch.cuda.Stream(self._device) if on_streams else None
        self._readers = ParameterReaders({})
        self._early: frozenset[str] = frozenset()
        self._reduced: list[tuple[frozenset[str], Work]] = []
        self._stepped: set[str] = set()
        self._is_noticed = True
        self._is_through_module = False
        # The memory of gradients as the last round left it, with its versions now and once it is set to zero.
        self._left: list[tuple[torch.Tensor, int, int]] = []
        self._zeroes_in_place = False

    def begin_round(self, early: Iterable[str]) -> None:
        """
        Args:
            early: the parameters whose gradients only compiled programs make.
        """
        self._optimizer.begin_round()
        self._is_through_module = not self._is_noticed
        self._readers = ParameterReaders(self._parameters)
        self._early = frozenset(name for name in early if self._optimizer.has(self._parameters[name]))

    def expect_backward(self, is_noticed: bool) -> None:
        """A synchronised forward ended.

        Args:
            is_noticed: its backward will call ``module_reached``, since the forward's results were found.
        """
        self._is_noticed = is_noticed

    def module_reached(self) -> None:
        """The backward goes through a synchronised forward: it is one that steps. A round is also that of another one
        which comes first after such a forward, whose gradients stock DDP reduces, too."""
        self._is_through_module = True

    def program_begins(self) -> None:
        self.module_reached()
        self._readers.program_begins()

    def reducing(self, names: Iterable[str], work: Work) -> None:
        """A bucket's collective is under way; its gradients are in place when it is done."""
        if early := self._early.intersection(names):
            self._reduced.append((early, work))

    def region_ended(self, values: Mapping[str, torch.Tensor] | None) -> None:
        """Steps what can be stepped by now; ``values`` as for ``ParameterReaders``."""
        self._readers.region_ended(values)
        left = []
        for names, work in self._reduced:
            if names & self._readers.read or not (self._stream is not None or work.is_completed()):
                left.append((names, work))
                continue
            if self._stream is None:
                work.wait()
                self._step(names)
                continue
            self._stream.wait_stream(current_stream(self._device))
            with torch.cuda.stream(self._stream):
                work.wait()
                self._step(names)
        self._reduced = left

    def end_round(self, gradients: Iterable[tuple[torch.Tensor, int]]) -> None:
        """All collectives are done: steps what is left.

        Args:
            gradients: the tensors in which they lie, and how many there are in each.
        """
        if not self._is_through_module:
            self._clear()
            return
        self._step(self._parameters.keys() - self._stepped)
        if self._stream is not None:
            current_stream(self._device).wait_stream(self._stream)
        self._optimizer.end_round()
        self._clear()
        self._left = [(tensor, tensor._version, tensor._version + count) for tensor, count in gradients]

    def abandon_round(self) -> None:
        """The backward did not come to its end.

        Raises:
            RuntimeError: part of the parameters had been stepped.
        """
        stepped, count = len(self._stepped), len(self._parameters)
        if self._stream is not None:
            current_stream(self._device).wait_stream(self._stream)
        self._clear()
        if stepped:
            raise RuntimeError(
                f"the last backward ended with an exception when {stepped} of {count} parameters had made their step "
                "already (step_in_backward): the model is between two steps. Load the last checkpoint, or go on with "
                "it as it is: this error comes once"
            )

    def begin_forward(self) -> None:
        """
        Raises:
            RuntimeError: somebody has changed the gradients since, which comes too late.
        """
        left, self._left = self._left, []
        changed = [(tensor, zeroed) for tensor, version, zeroed in left if tensor._version != version]
        if not changed:
            return
        # Setting each gradient to zero looks the same; whoever does that does it always, and does nothing else.
        if all(tensor._version <= zeroed for tensor, zeroed in changed):
            if not self._zeroes_in_place:
                gradients = self._gradients_in(changed)
                self._zeroes_in_place = bool(gradients) and not any(bool(each.any()) for each in gradients)
            if self._zeroes_in_place:
                return
        raise RuntimeError(
            "gradients were changed after the backward, but DDPOptions(step_in_backward=...) had made the step by "
            "then, so that had no effect: clip_grad_norm_ and the like need a compilation without step_in_backward, "
            "and optimizer.step(). To set gradients to zero in place, do it once a step"
        )

    def _gradients_in(self, changed: Iterable[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Those in the memory of these that are gradients still; others may be none by now. Where any are of the
        optimizer's parameters, only those: what the others' become is not the optimizer's affair."""
        memory = {tensor.untyped_storage().data_ptr() for tensor, _ in changed}
        held = [
            (self._optimizer.has(parameter), parameter.grad)
            for parameter in self._parameters.values()
            if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() in memory
        ]
        return [gradient for is_stepped, gradient in held if is_stepped] or [gradient for _, gradient in held]

    def _step(self, names: Iterable[str]) -> None:
        self._stepped.update(names)
        with torch.no_grad():
            # In the module's order, whichever bucket they are in.
            chosen = set(names)
            self._optimizer.step(self._parameters[name] for name in self._parameters if name in chosen)

    def _clear(self) -> None:
        self._early = frozenset()
        self._reduced.clear()
        self._stepped.clear()
