"""What compiled functions of one code object share: programs, the limit, and nothing that differs between them."""

import functools
import gc
import logging

import pytest
import torch

import gradsplit
from gradsplit.compile_core.interface.testing import CompileCounter


class Block(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).relu()

    def twice(self, x):
        return self.linear(x) * 2


class BreakingBlock(Block):
    def forward(self, x):
        print(end="")
        return super().forward(x)


def counted(count=1):
    """A backend that counts its graphs; inputs require gradients, so that all calls look alike."""
    return CompileCounter(), torch.randn(count, 4, requires_grad=True)


@pytest.mark.parametrize("kind", [Block, BreakingBlock])
@pytest.mark.parametrize("apart", [False, True])
def test_equal_blocks_are_one_program(kind, apart):
    counter, x = counted()
    blocks = [kind() for _ in range(6)]
    if apart:
        run = [gradsplit.compile(block, backend=counter) for block in blocks]
    else:
        run = [gradsplit.compile(torch.nn.Sequential(*blocks), backend=counter)]
    found = wanted = x
    for _ in range(2):
        for block in run:
            found = block(found)
        for block in blocks:
            wanted = block(wanted)
    assert torch.equal(found, wanted)
    assert counter.frame_count == 1


def test_functions_made_in_a_loop_are_one_program():
    counter, x = counted()
    for _ in range(20):
        assert torch.equal(gradsplit.compile(lambda x: x.sin() + 1, backend=counter)(x), x.sin() + 1)
    assert counter.frame_count == 1


def test_closures_and_defaults_are_each_function_s_own():
    def make(scale, shift):
        def scaled(x, by=scale, *, plus=shift):
            return x * by * scale + plus

        return scaled

    counter, x = counted()
    made = [
        make(*numbers) for numbers in ((2.0, 3.0), (2.0, 3.0), ("ab" and 5.0, 3.0), (torch.tensor(7.0), 1.0))
    ]
    compiled = [gradsplit.compile(function, backend=counter) for function in made]
    for _ in range(2):
        for plain, function in zip(made, compiled, strict=True):
            assert torch.equal(function(x), plain(x))
    assert counter.frame_count <= 3


def test_a_counter_in_a_cell_is_changed_where_it_belongs():
    def make():
        count = 0

        def step(x):
            nonlocal count
            count += 1
            return x + count

        return step, lambda: count

    counter, x = counted()
    pairs = [make() for _ in range(2)]
    for step, _ in pairs:
        run = gradsplit.compile(step, backend=counter)
        for number in (1, 2, 3):
            assert torch.equal(run(x), x + number)
    assert [read() for _, read in pairs] == [3, 3]
    assert counter.frame_count <= 3  # for 0, 1 and all others, of both


@pytest.mark.parametrize("restore", ["assigned", "deleted"])
def test_a_forward_that_is_replaced_for_each_call(restore):
    """As Lightning's strategies do it, by turns with plain calls."""
    counter, x = counted()
    module = Block()
    compiled = gradsplit.compile(module, backend=counter)
    for _ in range(10):
        original = compiled.forward

        def replaced(*args, original=original):
            compiled.forward = original
            return module.twice(*args)

        compiled.forward = replaced
        assert torch.equal(compiled(x), module.twice(x))
        if restore == "assigned":
            compiled.forward = original
        else:
            del compiled.forward
        assert torch.equal(compiled(x), Block.forward(module, x))
    assert counter.frame_count <= 3


def test_the_limit_holds_for_a_code_object(caplog):
    counter = CompileCounter()
    with caplog.at_level(logging.WARNING), gradsplit.config.patch(cache_size_limit=3):
        for number in range(10):
            module = Block()
            module.forward = functools.partial(lambda x, flag: x * len(flag), flag="a" * number)
            compiled = gradsplit.compile(module, backend=counter)
            assert torch.equal(compiled(torch.ones(2)), torch.ones(2) * number)
    assert counter.frame_count <= 3
    (line,) = [record.getMessage() for record in caplog.records if "the limit" in record.getMessage()]
    assert line.startswith("Block.forward was captured 3 times") and "forward" in line.split("most often")[1]


def test_memory_that_two_buffers_share_is_seen_in_each_object():
    class Buffers(torch.nn.Module):
        def __init__(self, one, other):
            super().__init__()
            self.register_buffer("one", one)
            self.register_buffer("other", other)

        def forward(self, x):
            self.one.add_(1)
            return x + self.other

    x = torch.zeros(2)
    apart = gradsplit.compile(Buffers(torch.zeros(2), torch.zeros(2)), backend="eager")
    shared = torch.zeros(2)
    together = gradsplit.compile(Buffers(shared, shared.view(2)), backend="eager")
    assert apart(x).tolist() == [0.0, 0.0]
    assert together(x).tolist() == [1.0, 1.0]


def test_nothing_is_shared_under_other_settings():
    def function(x):
        return x * 2

    x = torch.ones(2)
    compiled = [gradsplit.compile(function, backend=backend) for backend in ("eager", "aot_eager", "eager")]
    assert all(torch.equal(run(x), x * 2) for run in compiled)
    first, second, third = (run.entries[0] for run in compiled)
    assert first is third and first is not second
    gradsplit.reset()
    assert not any(run.entries for run in compiled)


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 10, 10), (200_000, 5, 5)])
def test_garbage_is_looked_for_rarely_during_a_compilation_alone(thresholds):
    seen = []

    def backend(module, examples):
        seen.append(gc.get_threshold())
        if len(seen) > 1:
            raise ValueError
        return module.forward

    before = gc.get_threshold()
    gc.set_threshold(*thresholds)
    try:
        compiled = gradsplit.compile(lambda x: x + 1, backend=backend)
        compiled(torch.ones(2))
        assert gc.get_threshold() == thresholds
        with pytest.raises(ValueError):
            compiled(torch.ones(2, dtype=torch.int))
        assert gc.get_threshold() == thresholds
    finally:
        gc.set_threshold(*before)
    assert all(during[0] == (100_000 if thresholds[0] == 700 else thresholds[0]) for during in seen)
