"""What a call finds outside of its arguments: modes and defaults of torch are guarded, a default device is followed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradsplit


def compile_eager(function):
    return gradsplit.compile(function, backend="eager", fullgraph=True)


def double(x):
    return x * 2


def check_guarded(change, function=double, arguments=None):
    """A call inside ``change`` needs an entry of its own; a call after it does not."""
    arguments = (torch.ones(2, 2),) if arguments is None else arguments
    compiled = compile_eager(function)
    compiled(*arguments)
    with change():
        inside, plain = compiled(*arguments), function(*arguments)
        assert inside.dtype == plain.dtype and inside.device == plain.device
        assert inside.requires_grad == plain.requires_grad
        assert len(compiled.entries) == 2
        compiled(*arguments)
    compiled(*arguments)
    assert len(compiled.entries) == 2


def check_not_guarded(change, function=double, arguments=None):
    arguments = (torch.ones(2, 2),) if arguments is None else arguments
    compiled = compile_eager(function)
    compiled(*arguments)
    with change():
        assert compiled(*arguments).dtype == function(*arguments).dtype
    assert len(compiled.entries) == 1


class Restored:
    """A setting of torch as a context manager."""

    def __init__(self, setter, value, before):
        self.setter, self.value, self.before = setter, value, before

    def __enter__(self):
        self.setter(self.value)

    def __exit__(self, *error):
        self.setter(self.before)


def deterministic():
    return Restored(torch.use_deterministic_algorithms, True, False)


def deterministic_warning():
    return Restored(lambda on: torch.use_deterministic_algorithms(on, warn_only=on), True, False)


def default_dtype():
    return Restored(torch.set_default_dtype, torch.float64, torch.float32)


def test_modes():
    for change in (torch.no_grad, torch.inference_mode, deterministic, deterministic_warning, default_dtype):
        check_guarded(change)


def test_autocast_with_its_dtype_and_its_cache():
    check_guarded(lambda: torch.autocast("cpu"), torch.mm, (torch.ones(2, 2), torch.ones(2, 2)))
    compiled = compile_eager(lambda x: x @ x)
    for index, arguments in enumerate(
        ({}, {"dtype": torch.float16}, {"cache_enabled": False}, {"enabled": False}), start=1
    ):
        with torch.autocast("cpu", **arguments):
            for _ in range(2):
                expected = torch.float32 if "enabled" in arguments else arguments.get("dtype", torch.bfloat16)
                assert compiled(torch.ones(2, 2)).dtype == expected
        assert len(compiled.entries) == index


def test_nested_autocast():
    def nested(x):
        with torch.autocast("cpu", dtype=torch.float16):
            y = x @ x
            with torch.autocast("cpu", enabled=False):
                z = x @ x
        return y, z

    compiled = compile_eager(nested)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert [result.dtype for result in compiled(torch.ones(2, 2))] == [torch.float16, torch.float32]
        assert [result.dtype for result in compiled(torch.ones(2, 2))] == [torch.float16, torch.float32]
    assert len(compiled.entries) == 2


def test_the_default_dtype_of_autocast_is_guarded_where_it_is_read():
    def other_default():
        return Restored(
            lambda dtype: torch.set_autocast_dtype("cpu", dtype),
            torch.float16,
            torch.get_autocast_dtype("cpu"),
        )

    def inner(x):
        with torch.autocast("cpu"):
            return x @ x

    check_guarded(other_default, inner)
    check_not_guarded(other_default)
    compiled = compile_eager(lambda x: (x, torch.get_autocast_dtype("cpu")))
    assert compiled(torch.ones(1))[1] == torch.bfloat16
    with other_default():
        assert compiled(torch.ones(1))[1] == torch.float16


def test_kernels_of_attention_are_guarded_where_there_is_attention():
    def math_only():
        return sdpa_kernel(SDPBackend.MATH)

    heads = torch.ones(1, 2, 4, 8)
    check_guarded(math_only, functional.scaled_dot_product_attention, (heads, heads, heads))
    check_not_guarded(math_only)


def test_global_hooks_of_modules():
    layer = nn.Linear(2, 2)
    compiled = gradsplit.compile(layer, backend="eager")
    x = torch.ones(1, 2)
    expected = compiled(x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, result: result + 1)
    try:
        assert torch.equal(compiled(x), expected + 1)
    finally:
        handle.remove()
    assert torch.equal(compiled(x), expected)


def make(x):
    y = torch.zeros(2) + torch.arange(2, dtype=torch.float32)
    return y, torch.ones(2, device="cpu"), torch.empty_like(x), torch.tensor([1, 2]), torch.full((1,), 3)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_is_followed_and_guarded(device):
    compiled = compile_eager(make)
    x = torch.ones(2)
    for _ in range(2):
        with torch.device(device):
            found, expected = compiled(x), make(x)
        assert [result.device.type for result in found] == [device, "cpu", "cpu", device, device]
        assert [result.device for result in found] == [result.device for result in expected]
        assert [result.device.type for result in compiled(x)] == ["cpu"] * 5
    assert len(compiled.entries) == 2


def test_set_default_device():
    compiled = compile_eager(make)
    torch.set_default_device("meta")
    try:
        assert compiled(torch.ones(2, device="cpu"))[0].device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert compiled(torch.ones(2))[0].device.type == "cpu"
    assert len(compiled.entries) == 2


def test_a_default_device_through_all_stages():
    compiled = gradsplit.compile(lambda x: torch.ones(3) * x, backend="aot_eager", fullgraph=True)
    x = torch.full((3,), 2.0, requires_grad=True)
    with torch.device("cpu"):
        compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    with torch.device("meta"):
        assert compiled(torch.ones(3)).device.type == "meta"


def test_the_default_device_is_asked_for():
    compiled = compile_eager(lambda x: (x + 1, torch.get_default_device()))
    assert compiled(torch.ones(1))[1] == torch.device("cpu")
    with torch.device("meta"):
        assert compiled(torch.ones(1, device="cpu"))[1] == torch.device("meta")


def test_nested_default_devices():
    compiled = compile_eager(make)
    with torch.device("meta"), torch.device("cpu"):
        assert compiled(torch.ones(2))[0].device.type == "cpu"
    with torch.device("cpu"), torch.device("meta"):
        assert compiled(torch.ones(2, device="cpu"))[0].device.type == "meta"


def test_other_function_modes_run_plain():
    seen = []

    class Recording(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    compiled = compile_eager(double)
    with Recording():
        assert torch.equal(compiled(torch.full((2,), 3.0)), torch.full((2,), 6.0))
    assert not compiled.entries and torch.Tensor.mul in seen
    with torch.device("cpu"), Recording():
        compiled(torch.ones(2))
    assert not compiled.entries


def test_modes_of_another_thread_are_its_own():
    compiled = compile_eager(make)
    compiled(torch.ones(2))
    found = []

    def work():
        with torch.device("meta"):
            found.append(compiled(torch.ones(2, device="cpu"))[0].device.type)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["meta"] and compiled(torch.ones(2))[0].device.type == "cpu"
