"""One recording of a program: what it reads, the results in its memory, and who still needs them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.runtime.region_interpreter import region_interpreter
from gradsplit.compile_core.torch_facts.autograd_engine import foreach_copy, storage_use_count


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
        must_outlast: of a successor, which computes in the memory of what its one source hides: set once results of it
            are held when the source is to be replayed.

    Attributes:
        hidden: positions of the results that are not given out.
        is_lent: whether it holds the memory of these no more; see ``lend``.
    """

    def __init__(
        self,
        replay: Callable[[], None],
        sources: Sequence[Recording],
        copies: Mapping[int, torch.Tensor],
        results: Sequence[torch.Tensor | Borrowed | None],
        num_given: int,
        stream: Any,
        must_outlast: threading.Event | None = None,
    ) -> None:
        self.replay = replay
        # Not held, or a forward that is recorded anew would keep the memory of what it was before.
        self._sources = [*map(weakref.ref, sources)]
        self.results = list(results)
        self._must_outlast = must_outlast
        # Held, since what it gave out must not be overwritten even when its program uses it no more.
        self._successor: Recording | None = None
        self.is_lent = False
        if must_outlast is not None:
            (source,) = sources
            source._successor = self
        self.stream = stream
        self._copies = copies
        visible = {storage_of(result) for result in results[:num_given] if isinstance(result, torch.Tensor)}
        given: list[Any] = [
            None if isinstance(result, torch.Tensor) and storage_of(result) not in visible else result
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
            None if isinstance(result, Borrowed) else places_of([result])[0] for result in given
        )
        # Two results that are one tensor stay one.
        distinct = {id(result): result for result in given if isinstance(result, torch.Tensor)}
        numbers = {identity: number for number, identity in enumerate(distinct)}
        self._tensors = list(distinct.values())
        self._plan = [numbers[id(result)] if isinstance(result, torch.Tensor) else result for result in given]
        self._results_in: dict[int, list[int]] = {}
        for position, result in enumerate(given):
            if isinstance(result, torch.Tensor):
                self._results_in.setdefault(storage_of(result), []).append(position)
        # Holders of each storage while nobody outside holds it.
        self._idle = {storage: storage_use_count(storage) for storage in self._results_in}

    def streams(self) -> Iterator[Any]:
        """Where its memory was last used: by itself, and elsewhere if its successor was."""
        own, successor = self.stream, self._successor
        yield own
        if successor is not None and successor.stream != own:
            yield successor.stream

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

    @property
    def is_successor(self) -> bool:
        """Whether it overwrites what its source keeps."""
        return self._must_outlast is not None

    def lend(self, lent: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Gives its hidden results away, so that whoever is recorded with them may use their memory.

        Args:
            lent: makes tensors in the memory of others that do not hold it. They take the results' place.

        Returns:
            By position the hidden results, which nobody else holds.
        """
        self.is_lent = True
        owned = {
            position: result
            for position, result in enumerate(self.results)
            if position in self.hidden and isinstance(result, torch.Tensor)
        }
        for position, tensor in zip(owned, lent([*owned.values()]), strict=True):
            self.results[position] = tensor
        return owned

    def is_read_last(self, inputs: list[Any], position: int) -> bool:
        """Whether nobody but the owner of ``inputs`` holds the witness, which stands there at a position."""
        witness = inputs[position]
        storage = storage_of(witness)
        # Another tensor stands for it meanwhile, so that this recording is in use until the inputs are gone.
        inputs[position] = witness.detach()
        del witness
        idle = self._idle.get(storage)
        return idle is not None and storage_use_count(storage) == idle + 1

    def is_awaited(self) -> bool:
        """Whether somebody holds results of the successor, which a replay of this one would overwrite. That program is
        to have no more successors then."""
        successor = self._successor
        if successor is None or not successor.held():
            return False
        assert successor._must_outlast is not None
        successor._must_outlast.set()
        return True

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
                results[position] = new_like(source)
                pairs.append((results[position], source))
        _copy_all(pairs)
        return results


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def places_of(values: Sequence[Any]) -> list[int | None]:
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


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def borrowed_from(result: Any, owners: Mapping[int, int], static: Sequence[torch.Tensor]) -> Borrowed | None:
    position = owners.get(storage_of(result)) if isinstance(result, torch.Tensor) else None
    if position is None:
        return None
    offset = int(result.storage_offset()) - int(static[position].storage_offset())
    return Borrowed(position, tuple(result.shape), tuple(result.stride()), offset)
