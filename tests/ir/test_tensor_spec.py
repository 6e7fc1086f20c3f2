"""Layout questions that a spec answers, compared with torch's own answers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsplit.compile_core.ir.tensor_spec import TensorSpec, contiguous_strides

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec.of(tensor)


@given(shapes)
def test_row_major_strides(shape):
    tensor = torch.empty(shape)
    assert contiguous_strides(shape) == tensor.stride()
    assert TensorSpec.contiguous(shape, tensor.dtype, tensor.device) == spec_of(tensor)


@given(shapes, st.randoms(use_true_random=False))
def test_layout_of_permuted_and_sliced_tensors(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.empty(shape).permute(order)
    assert spec_of(tensor).is_dense
    assert spec_of(tensor).is_contiguous == tensor.is_contiguous()
    if shape:
        sliced = tensor[..., ::2]
        assert spec_of(sliced).is_contiguous == sliced.is_contiguous()


def test_expanded_tensor_is_not_dense():
    assert not spec_of(torch.empty(3, 1).expand(3, 4)).is_dense


def test_sizes():
    spec = spec_of(torch.empty(2, 3, dtype=torch.bfloat16))
    assert (spec.numel, spec.bytes) == (6, 12)
    assert spec_of(torch.empty(())).numel == 1


def test_print():
    assert str(spec_of(torch.empty(2, 3))) == "float32[2, 3] cpu"
    assert str(spec_of(torch.empty(2, 3, dtype=torch.int64).t())) == "int64[3, 2] strides [1, 3] cpu"
