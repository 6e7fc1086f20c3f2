"""Where programs store gradients that come in 16 bits or in 32, round by round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bucketing.bucket import Parameter
from bucketing.reducer_plan import reducer_plan
from distributed.collectives.shared_buffers import NarrowPart, SharedBuffer
from distributed.gradients.bucket_buffers import BucketBuffers
from distributed.gradients.narrow_values import NarrowValues

SENT = torch.bfloat16
NAMES = ("a", "b", "c")


def allocate(
    numel: int, dtype: torch.dtype, device: torch.device, narrow: NarrowPart | None = None
) -> SharedBuffer:
    return SharedBuffer([torch.zeros(numel, dtype=dtype, device=device)], 0, narrow)


@pytest.fixture
def buffers() -> BucketBuffers:
    """Of one bucket; the gradients of ``a`` and ``b`` come in 16 bits."""
    parameters = {name: nn.Parameter(torch.zeros(32)) for name in NAMES}
    described = [
        Parameter(name, 32, 4, "torch.float32", "cpu", None if name == "c" else str(SENT)) for name in NAMES
    ]
    return BucketBuffers(reducer_plan(described), parameters, dict.fromkeys(NAMES, (1,)), allocate)


def test_what_comes_as_it_is_sent_has_its_place(buffers: BucketBuffers) -> None:
    values, dtypes = NarrowValues(buffers), (SENT, SENT, None)
    for _ in range(2):
        found = values.places(NAMES, dtypes)
        one_by_one = [values.place(name, dtype) for name, dtype in zip(NAMES, dtypes, strict=True)]
        assert found is not None and list(map(id, found)) == list(map(id, one_by_one))
        assert [place.dtype for place in found] == [SENT, SENT, torch.float32]
        values.arrived(NAMES)
        assert values.take(0) is buffers.narrow_values[0]
        values.clear()


@pytest.mark.parametrize("dtypes", [(SENT, None, None), (SENT, torch.float16, None), (SENT, SENT, SENT)])
def test_what_comes_otherwise_is_placed_one_by_one(
    buffers: BucketBuffers, dtypes: tuple[torch.dtype | None, ...]
) -> None:
    values = NarrowValues(buffers)
    assert values.places(NAMES, dtypes) is None
    assert values.places(("c",), (None,)) == [buffers.places["c"]]


def test_a_bucket_with_32_bits_has_no_place_for_16(buffers: BucketBuffers) -> None:
    values = NarrowValues(buffers)
    assert values.place("a", None) is buffers.places["a"]
    assert values.places(("b",), (SENT,)) is None and values.take(0) is None
    values.clear()
    assert values.places(("b",), (SENT,)) == [buffers.narrow_places["b"]]


def test_values_and_places_move_with_their_bucket(buffers: BucketBuffers) -> None:
    view = buffers.flat[0][1:2]
    buffers.restore_places()
    assert buffers.flat[0] is not buffers.allocated[0].mine
    values = buffers.narrow_values[0]
    assert values is not None and values.data_ptr() == buffers.flat[0].data_ptr() != view.data_ptr() - 4
    assert buffers.narrow_places["a"].untyped_storage().data_ptr() == values.data_ptr()
    # Nobody has views of the new memory.
    moved_to = buffers.flat[0]
    buffers.restore_places()
    assert buffers.flat[0] is moved_to
