"""Runs a program by replaying a recording of it: what a recording reads where, and whose memory it may overwrite.

A recording reads and writes fixed addresses, so a replay overwrites what the one before it returned. Of torch's CUDA
graph trees the rule is kept that nothing is overwritten that somebody still uses; the trees are not. Every recording
has memory of its own, shared with no other, and is free while nobody outside holds a result in it. A call takes a free
one:

* *Inputs* are read where they lie, as parameters are, or copied before a replay. An input is taken to stay where it is
  until it comes from another address; it is copied from then on, in new recordings. When inputs move for a second time,
  so are all that are new tensors since the first: what a plain program computes often lies where it did, and each that
  moved at last would cost a recording. What a backward gets from its forward lies in a recording of the forward: the
  backward has a recording for each of those.
* *Results* are given out as new tensors over the recording's memory. If one that reaches the user (a loss, a gradient)
  is alive at the next call, it is copied out from then on, in a new recording.
* *What a forward keeps* for its backward stays in its recording, and no tensors are made of it. In the place of the
  first of them stands a *witness*, an empty tensor by whose address the backward finds the recording; for the others
  ``None``. While a witness is alive, as in two forwards before a backward, another recording is made. A backward in two
  programs is the same once more: the second one reads what the forward and the first one keep.

The first call runs plainly, since libraries choose their kernels there. A call that no recording serves runs plainly
too; the reason is logged once. Two limits: a user who changes a copied result in place gets no error, as in eager
mode, that the backward needed it; a result that another stream still reads must be held until that stream is done.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.pick import picker
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.runtime.region_interpreter import region_interpreter
from gradsplit.compile_core.torch_facts.autograd_engine import (
    foreach_copy,
    storage_use_count,
    tell_of_changes,
)
from gradsplit.compile_core.torch_facts.torch_switches import saved_tensor_hooks_are_active

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 4  # recordings of one program
_EVER_FOR_EACH = 4  # recordings made of one program, for each that there may be at once
_MOST_IN_PROCESS = 128


class Recorder(Protocol):
    """Makes recordings; for CUDA see ``cuda_graphs``."""

    def reason_against(self) -> str:
        """Why nothing can be recorded or replayed at this moment, or ""."""
        ...

    def in_parts(self) -> Recorder:
        """A recorder of what is replayed one after the other, always in the order in which it was recorded: memory that
        one recording has freed may be used by the next."""
        ...

    def record(
        self, program: Program, inputs: list[torch.Tensor]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """What computes the program's results from what lies at the inputs' addresses by then, and the tensors into
        which it does. The inputs are not held, nor are the results computed yet. The list may be emptied.
        """
        ...

    def follow(self, stream: Any) -> Any:
        """Makes what comes next wait for the work on a stream that an earlier call gave; returns the current one."""
        ...


@dataclass(frozen=True)
class Borrowed:
    """A result in the memory of an input, which is made from the input of each call."""

    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, given: torch.Tensor) -> torch.Tensor:
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)


class Recording:
    """One recording: what it reads, and the results in its memory.

    Args:
        replay: computes the results.
        sources: the recordings of other programs in whose memory it reads. Addresses do not tell them: when one is
            gone, another may lie where it was.
        copies: the tensor into which an input is copied, by position.
        results: tensors in its memory, ``Borrowed``, or ``None``.
        num_given: how many of the first results are given out. The others are only where they share memory with those.
        stream: where it was last used; see ``Recorder.follow``.
    """

    def __init__(
        self,
        replay: Callable[[], None],
        sources: Sequence[Recording],
        copies: Mapping[int, torch.Tensor],
        results: Sequence[torch.Tensor | Borrowed | None],
        num_given: int,
        stream: Any,
    ) -> None:
        self.replay = replay
        # Not held, or a forward that is recorded anew would keep the memory of what it was before.
        self._sources = [*map(weakref.ref, sources)]
        self.results = results
        self.stream = stream
        self._copies = copies
        visible = {_storage(result) for result in results[:num_given] if isinstance(result, torch.Tensor)}
        given: list[Any] = [
            None if isinstance(result, torch.Tensor) and _storage(result) not in visible else result
            for result in results
        ]
        self.hidden = frozenset(
            position for position, result in enumerate(results) if given[position] is not result
        )
        if self.hidden:
            given[min(self.hidden)] = _witness(results[min(self.hidden)])
        self.borrows = any(isinstance(result, Borrowed) for result in results)
        # What is borrowed has no place of its own.
        self.places = tuple(
            None if isinstance(result, Borrowed) else _places([result])[0] for result in given
        )
        # Two results that are one tensor stay one.
        distinct = {id(result): result for result in given if isinstance(result, torch.Tensor)}
        numbers = {identity: number for number, identity in enumerate(distinct)}
        self._tensors = list(distinct.values())
        self._plan = [numbers[id(result)] if isinstance(result, torch.Tensor) else result for result in given]
        self._results_in: dict[int, list[int]] = {}
        for position, result in enumerate(given):
            if isinstance(result, torch.Tensor):
                self._results_in.setdefault(_storage(result), []).append(position)
        # Holders of each storage while nobody outside holds it.
        self._idle = {storage: storage_use_count(storage) for storage in self._results_in}

    def reads(self, sources: Sequence[Recording]) -> bool:
        """Whether it computes from what these recordings kept."""
        return all(own() is source for own, source in zip(self._sources, sources, strict=True))

    def is_of_use(self) -> bool:
        """Whether what it reads is still there."""
        return all(source() is not None for source in self._sources)

    def held(self) -> list[list[int]]:
        """For each piece of memory that somebody outside holds, the positions of the results in it."""
        return [
            self._results_in[storage]
            for storage, idle in self._idle.items()
            if storage_use_count(storage) != idle
        ]

    def read(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copies what has to be copied."""
        _copy_all([(copy, inputs[position]) for position, copy in self._copies.items()])

    def give(self, inputs: Sequence[torch.Tensor], copied: Iterable[int]) -> list[Any]:
        """New tensors for the results; those at the positions ``copied`` have memory of their own."""
        alias = _inference_alias if torch.is_inference_mode_enabled() else torch.Tensor.detach
        aliases = list(map(alias, self._tensors))
        results: list[Any] = [
            aliases[item] if isinstance(item, int) else item and item.of(inputs[item.position])
            for item in self._plan
        ]
        pairs = []
        for position in copied:
            source = self.results[position]
            if isinstance(source, torch.Tensor):
                results[position] = _empty_like(source)
                pairs.append((results[position], source))
        _copy_all(pairs)
        return results


_living: weakref.WeakSet[Recording] = weakref.WeakSet()


class RecordedSource:
    """What a program reads of another one's results: a backward of its forward's.

    Args:
        program: the other one.
        kept: position of the input -> position among that program's results.
    """

    def __init__(self, program: GraphedProgram, kept: Mapping[int, int]) -> None:
        self.program = program
        self.kept = dict(kept)
        self._pick = picker(self.kept)
        # Where the inputs lie that a recording of that program computes.
        self._places: weakref.WeakKeyDictionary[Recording, tuple[int | None, ...]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, places: Sequence[int | None]) -> Recording | None:
        """The recording that computed what comes from it, by the inputs' addresses."""
        for recording in self.program.alive():
            expected = self._places_in(recording)
            if self._pick(places) == expected:
                return recording
        return None

    def restore(self, inputs: list[Any], recording: Recording) -> None:
        """Puts what the recording hides into the inputs."""
        for position, k in self.kept.items():
            if k in recording.hidden:
                kept = recording.results[k]
                assert isinstance(kept, torch.Tensor)
                inputs[position] = kept.detach()

    def _places_in(self, recording: Recording) -> tuple[int | None, ...]:
        places = self._places.get(recording)
        if places is None:
            borrowed = [position for position, k in self.kept.items() if recording.places[k] is None]
            if borrowed:
                # What that program borrowed from an input of its own is an input like any other.
                self.kept = {position: k for position, k in self.kept.items() if position not in borrowed}
                self._pick = picker(self.kept)
                self._places.clear()
            places = tuple(map(recording.places.__getitem__, self.kept.values()))
            self._places[recording] = places
        return places


class GraphedProgram:
    """A program that is recorded at its second call and replayed from then on.

    Args:
        name: for the log.
        program: computes tensors from tensors and changes nothing else, but for the inputs ``changed``; the same
            layouts come at every call.
        recorder: records it.
        num_visible: how many of the first results reach the user; the rest is kept for the backward.
        hides: whether the backward finds what is kept for it in the recording; else it is given out as well.
        changed: positions of inputs that the program changes.
        uncounted: of these, those whose versions do not count it; see ``Mutation``.
        copied_in: positions of inputs that come from elsewhere every time.
        copied_out: positions of results that are copied out from the start.
        sources: the programs that computed some of its inputs.
        at_once: how many recordings there may be.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        recorder: Recorder,
        num_visible: int,
        *,
        hides: bool = False,
        changed: Sequence[int] = (),
        uncounted: Container[int] = (),
        copied_in: Iterable[int] = (),
        copied_out: Iterable[int] = (),
        sources: Iterable[RecordedSource] = (),
        at_once: int = MOST_AT_ONCE,
    ) -> None:
        self._name = name
        self._program = program
        self.recorder = recorder
        self.at_once = at_once
        self._num_visible = num_visible
        self._hides = hides
        self._changed = tuple(changed)
        self._counted = tuple(position for position in changed if position not in uncounted)
        self._copied_in = set(copied_in)
        self._copied_out = set(copied_out)
        self._sources = [source for source in sources if source.kept]
        self._seen: list[int | None] | None = None
        # The tensors that were there when inputs moved for the first time, by their ids.
        self._before_moves: list[int] | None = None
        # Inputs that are taken to stay where they are; None where that has to be found out.
        self._watched: list[int] | None = None
        self._pick_watched = picker(())
        self._watched_places: tuple[int | None, ...] = ()
        self._recordings: list[Recording] = []
        # Those that are used no more, while a backward may still come for what they kept.
        self._leaving: list[Recording] = []
        self._recorded = 0
        self._given_up = False
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        with self._lock:
            places = _places(inputs)
            found = self._find_sources(places)
            recording = None if self._given_up else self._choose(inputs, places, found)
            if recording is not None:
                recording.stream = self.recorder.follow(recording.stream)
                recording.read(inputs)
                recording.replay()
                if self._counted:
                    tell_of_changes([inputs[position] for position in self._counted])
                if recording.borrows:
                    self._restore(inputs, found)
                results = recording.give(inputs, self._copied_out)
                inputs.clear()
                return results
            self._restore(inputs, found)
        return self._program(inputs)

    def restored(self, saved: Sequence[Any]) -> list[Any]:
        """What was saved for a backward, with all that its forward kept."""
        values = [*saved]
        with self._lock:
            self._restore(values, self._find_sources(_places(saved)))
        return values

    def alive(self) -> list[Recording]:
        """The recordings whose results somebody may still read."""
        return [*self._recordings, *self._leaving]

    def _restore(self, inputs: list[Any], found: Sequence[Recording | None]) -> None:
        for source, recording in zip(self._sources, found, strict=True):
            if recording is not None:
                source.restore(inputs, recording)

    def _choose(
        self, inputs: Sequence[Any], places: list[int | None], found: Sequence[Recording | None]
    ) -> Recording | None:
        """A free recording that reads these inputs, made if need be; None where the program must run plainly."""
        reason = self.recorder.reason_against()
        if self._hides and saved_tensor_hooks_are_active():
            reason = "hooks for saved tensors ask for what it saves"
        if reason:
            return self._run_plainly(reason)
        if self._seen is None:
            self._seen = places
            return None
        sources = [recording for recording in found if recording is not None]
        if len(sources) < len(found):
            return None  # the forward ran plainly, and has said why
        self._forget_moved(places, inputs)
        for recording in list(self._recordings):
            if recording.reads(sources):
                held = recording.held()
                if not held:
                    return recording
                to_copy = [self._not_yet_copied(positions) for positions in held]
                if all(to_copy):
                    self._copied_out.update(*to_copy)
                    self._recordings.remove(recording)
        return self._record(inputs, sources)

    def _find_sources(self, places: Sequence[int | None]) -> list[Recording | None]:
        """For each source, the recording that computed what comes from it."""
        found = []
        for source in self._sources:
            kept = len(source.kept)
            found.append(source.find(places))
            if len(source.kept) < kept:
                self._watched = None
            if found[-1] is None and any(places[position] == -1 for position in source.kept):
                raise InternalError(f"{self._name} got a witness of a recording that is gone")
        return found

    def _forget_moved(self, places: list[int | None], inputs: Sequence[Any]) -> None:
        assert self._seen is not None
        if self._watched is None:
            elsewhere = self._copied_in.union(*(source.kept for source in self._sources))
            self._watched = [position for position in range(len(places)) if position not in elsewhere]
            self._pick_watched = picker(self._watched)
            self._watched_places = self._pick_watched(self._seen)
        if self._pick_watched(places) == self._watched_places:
            return
        moved = {position for position in self._watched if places[position] != self._seen[position]}
        if self._before_moves is None:
            self._before_moves = [*map(id, inputs)]
        else:
            moved.update(p for p in self._watched if id(inputs[p]) != self._before_moves[p])
        # What is changed cannot be copied, so its new address needs a new recording.
        self._copied_in.update(moved.difference(self._changed))
        self._seen = places
        self._watched = None
        self._leaving += self._recordings
        self._recordings.clear()

    def _not_yet_copied(self, positions: Sequence[int]) -> set[int]:
        """Those results that would be copied instead, were they known to outlive the next call."""
        return {p for p in positions if p < self._num_visible and p not in self._copied_out}

    def _record(self, inputs: Sequence[Any], sources: Sequence[Recording]) -> Recording | None:
        self._leaving = [recording for recording in self._leaving if recording.held()]
        self._recordings = [recording for recording in self._recordings if recording.is_of_use()]
        if len(self._recordings) >= self.at_once:
            return self._run_plainly(f"results of {self.at_once} earlier runs are still in use")
        if self._recorded >= _EVER_FOR_EACH * self.at_once:
            return self._run_plainly(f"it was recorded {self._recorded} times already")
        if len(_living) >= _MOST_IN_PROCESS:
            return self._run_plainly(f"there are {_MOST_IN_PROCESS} recordings already")
        try:
            # Tensors made in inference mode could not be given out to autograd later.
            with torch.inference_mode(False), torch.no_grad():
                copies = {position: _empty_like(inputs[position]) for position in sorted(self._copied_in)}
                static: list[Any] = [copies.get(position, tensor) for position, tensor in enumerate(inputs)]
                self._restore(static, sources)
                replay, results = self.recorder.record(self._program, [*static])
        except Exception as error:
            self._given_up = True
            return self._run_plainly(f"recording failed: {error}")
        owners = {_storage(tensor): position for position, tensor in enumerate(static)}
        described = [_borrowed(result, owners, static) or result for result in results]
        del results
        follow = self.recorder.follow(None)
        num_given = self._num_visible if self._hides else len(described)
        recording = Recording(replay, sources, copies, described, num_given, follow)
        log_artifact("cudagraphs", lambda: f"{self._name} was recorded, {self._recorded + 1} times by now")
        self._recordings.append(recording)
        self._recorded += 1
        _living.add(recording)
        return recording

    def _run_plainly(self, reason: str) -> None:
        log_artifact("cudagraphs", lambda: f"{self._name} runs without a recording: {reason}")
        if reason not in self._reported:
            self._reported.add(reason)
            logger.warning("%s runs without a recording: %s", self._name, reason)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _places(values: Sequence[Any]) -> list[int | None]:
    """Addresses; that of nothing is -1."""
    interpreter = region_interpreter()
    if interpreter is not None:
        return interpreter.addresses([*values])
    return [-1 if value is None else value.data_ptr() for value in values]


def _witness(kept: Any) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(1, dtype=torch.uint8, device=kept.device)


def _inference_alias(tensor: torch.Tensor) -> torch.Tensor:
    """What ``detach`` would be if the tensor had been made in inference mode, as the program would make it there."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride())


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies each second tensor into the first, which has the same layout; one launch for those of a dtype."""
    if not pairs:
        return
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in pairs:
        if not TensorSpec.of(target).is_dense:
            target, source = _memory_of(target), _memory_of(source)
        by_dtype.setdefault(target.dtype, []).append((target, source))
    with torch.no_grad():
        for group in by_dtype.values():
            foreach_copy([target for target, _ in group], [source for _, source in group])


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All that a tensor spans, in the order of memory: gaps and shared elements as they lie."""
    return tensor.as_strided((TensorSpec.of(tensor).span,), (1,), tensor.storage_offset())


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _borrowed(result: Any, owners: Mapping[int, int], static: Sequence[torch.Tensor]) -> Borrowed | None:
    position = owners.get(_storage(result)) if isinstance(result, torch.Tensor) else None
    if position is None:
        return None
    offset = int(result.storage_offset()) - int(static[position].storage_offset())
    return Borrowed(position, tuple(result.shape), tuple(result.stride()), offset)
