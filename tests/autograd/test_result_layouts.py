"""Results have eager's strides, and what the backward reads of a changed input has the old values."""

import pytest
import torch

from tests.autograd.compare_with_eager import check


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_a_result_written_through_a_transposed_view_keeps_its_strides(backend):
    def program(x, mask):
        y = x * 1
        y.permute(2, 0, 1).masked_fill_(mask > 0, 0.5)
        return y.relu()

    check(program, leaf(2, 3, 4), torch.randn(4, 2, 3), backend=backend)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_a_saved_view_of_an_input_that_changes_afterwards_is_a_copy(backend):
    def program(x, y, z):
        transposed = x.t()
        result = z / (transposed.abs() + 1)
        x.mul_(y)
        return result

    check(program, torch.randn(3, 3), torch.randn(3, 3), leaf(3, 3), backend=backend, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_dims_of_one_element_decide_how_a_convolution_lies(backend):
    """A kernel's view gives such a dim a stride of its own, by which the convolution takes its input as row-major."""

    def program(x, weight):
        y = torch.nn.functional.conv1d(x.reshape(-1, 1, 3), weight, padding=1)
        return y * 1, y.relu() * 2, torch.nn.functional.max_pool1d(y, 2, ceil_mode=True)

    x = torch.randn(2, 3, 1, dtype=torch.float64).mT
    weight = torch.randn(2, 1, 3, dtype=torch.float64).requires_grad_()
    check(program, x, weight, backend=backend, rtol=1e-12, atol=1e-12)
