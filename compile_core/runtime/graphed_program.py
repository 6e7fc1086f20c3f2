"""Runs a program by replaying a recording of it: what a recording reads where, and whose memory it may overwrite.

A recording reads and writes fixed addresses, so a replay overwrites what the one before it returned. Of torch's CUDA
graph trees the rule is kept that nothing is overwritten that somebody still uses; the trees are not. What a recording
returns lies in memory of its own, and it is free while nobody outside holds that. A call takes a free one:

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

* *What a backward computes* lies in the memory of what its forward kept, as that is used up: it is recorded as the
  *successor* of the forward's recording, which is then not replayed while somebody holds the backward's results. If
  that happens, as when gradients are added up, or if the backward is to run again (``retain_graph``), the program's
  later recordings have memory of their own, as has each further backward that reads the same recording.

The first call runs plainly, since libraries choose their kernels there. A call that no recording serves runs plainly
too; the reason is logged once. Two limits: a user who changes a copied result in place gets no error, as in eager
mode, that the backward needed it; a result that another stream still reads must be held until that stream is done.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.pick import picker
from gradsplit.compile_core.runtime.recording import (
    Recording,
    borrowed_from,
    new_like,
    places_of,
    storage_of,
)
from gradsplit.compile_core.torch_facts.autograd_engine import tell_of_changes
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

    def in_parts(self, within: Any = None) -> Recorder:
        """A recorder of what is replayed one after the other, always in the order in which it was recorded: memory that
        one recording has freed may be used by the next. They may use memory ``within`` an earlier recording; see
        ``record``."""
        ...

    def rehearse(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        """The results of the first run, which is not recorded."""
        ...

    def record(
        self, program: Program, inputs: list[torch.Tensor], within: Any = None
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """What computes the program's results from what lies at the inputs' addresses by then, and the tensors into
        which it does. The inputs are not held, nor are the results computed yet. The list may be emptied.

        Args:
            within: what replays an earlier recording, of which some results are among the inputs and held by nobody
                else. Their memory is used for what is computed once they have been read.
        """
        ...

    @property
    def lends(self) -> bool:
        """Whether anything can be recorded ``within`` another recording."""
        ...

    def lent(self, tensors: list[torch.Tensor], replay: Any) -> list[torch.Tensor]:
        """Tensors in the same memory, which hold not that but what replays the recording to which it belongs."""
        ...

    def follow(self, stream: Any) -> Any:
        """Makes what comes next wait for the work on a stream that an earlier call gave; returns the current one."""
        ...


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

    def move(self, inputs: list[Any], recording: Recording, recorder: Recorder) -> set[int]:
        """Puts what the recording hides into the inputs, which are then all that holds it, and says where it is."""
        hidden = recording.lend(lambda tensors: recorder.lent(tensors, recording.replay))
        moved = {position: hidden[k] for position, k in self.kept.items() if k in hidden}
        for position, tensor in moved.items():
            inputs[position] = tensor
        return {*moved}

    def witness(self, recording: Recording) -> int | None:
        """The position among the inputs of the witness of a recording; ``None`` if that has none."""
        first = min(recording.hidden, default=None)
        return next((position for position, k in self.kept.items() if k == first), None)

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
        reads_last: whether nothing else reads what its one source keeps, unless a graph of autograd's is retained. It
            may then compute in that memory.
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
        reads_last: bool = False,
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
        # Whether results have outlasted the next replay of the source, or it was read again.
        self._must_outlast = threading.Event()
        if not (reads_last and recorder.lends):
            self._must_outlast.set()
        self._given_up = False
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        with self._lock:
            places = places_of(inputs)
            is_new = self._seen is None
            found = self._find_sources(places)
            recording = None if self._given_up else self._choose(inputs, places, found)
            if recording is not None:
                for stream in recording.streams():
                    recording.stream = self.recorder.follow(stream)
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
            is_first = is_new and self._seen is not None
        return self.recorder.rehearse(self._program, inputs) if is_first else self._program(inputs)

    def restored(self, saved: Sequence[Any]) -> list[Any]:
        """What was saved for a backward, with all that its forward kept."""
        values = [*saved]
        with self._lock:
            self._restore(values, self._find_sources(places_of(saved)))
        return values

    @property
    def may_overwrite(self) -> bool:
        """Whether it may still be recorded in the memory of what its source keeps."""
        return not (self._must_outlast.is_set() or self._given_up)

    def keep_apart(self) -> None:
        """Its later recordings have memory of their own, since others read what its source keeps, too."""
        self._must_outlast.set()

    def alive(self) -> list[Recording]:
        """The recordings whose results somebody may still read."""
        return [*self._recordings, *self._leaving]

    def _restore(self, inputs: list[Any], found: Sequence[Recording | None]) -> None:
        for source, recording in zip(self._sources, found, strict=True):
            if recording is not None:
                source.restore(inputs, recording)

    def _choose(
        self, inputs: list[Any], places: list[int | None], found: Sequence[Recording | None]
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
        may_overwrite = self._may_overwrite(inputs, sources)
        for recording in list(self._recordings):
            if recording.reads(sources):
                if recording.is_successor and not may_overwrite:
                    self._recordings.remove(recording)
                    continue
                held = recording.held()
                if not held:
                    if not recording.is_awaited():
                        return recording
                    self._recordings.remove(recording)
                    continue
                to_copy = [self._not_yet_copied(positions) for positions in held]
                if all(to_copy):
                    self._copied_out.update(*to_copy)
                    self._recordings.remove(recording)
        return self._record(inputs, sources, may_overwrite)

    def _may_overwrite(self, inputs: list[Any], sources: Sequence[Recording]) -> bool:
        """Whether nobody will ask again for what the source kept for this call."""
        if self._must_outlast.is_set() or len(sources) != 1:
            return False
        position = self._sources[0].witness(sources[0])
        if position is None:
            return False
        if not sources[0].is_read_last(inputs, position):
            self._must_outlast.set()
            return False
        return True

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

    def _record(
        self, inputs: Sequence[Any], sources: Sequence[Recording], may_overwrite: bool
    ) -> Recording | None:
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
                copies = {position: new_like(inputs[position]) for position in sorted(self._copied_in)}
                static: list[Any] = [copies.get(position, tensor) for position, tensor in enumerate(inputs)]
                moved: set[int] = set()
                within = None
                if may_overwrite and not sources[0].is_lent:
                    within = sources[0].replay
                    moved = self._sources[0].move(static, sources[0], self.recorder)
                else:
                    self._restore(static, sources)
                given = [*static]
                for position in moved:
                    static[position] = None
                replay, results = self.recorder.record(self._program, given, within)
        except Exception as error:
            self._given_up = True
            return self._run_plainly(f"recording failed: {error}")
        owners = {
            storage_of(tensor): position for position, tensor in enumerate(static) if tensor is not None
        }
        described = [borrowed_from(result, owners, static) or result for result in results]
        del results
        follow = self.recorder.follow(None)
        num_given = self._num_visible if self._hides else len(described)
        must_outlast = None if within is None else self._must_outlast
        recording = Recording(replay, sources, copies, described, num_given, follow, must_outlast)
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
