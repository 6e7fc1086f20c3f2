"""Tensors drawn from a ``torch.Generator`` of the program: the plain program's, and so is the generator afterwards."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gradsplit

of_module = torch.Generator()


def drawn_by_functions(x, g, size):
    noise = torch.randn(size, generator=g) + torch.rand((size,), generator=g, dtype=torch.float64)
    chosen = torch.randint(0, 9, (size,), generator=g) + torch.randint(5, (size,), generator=g)
    return x[torch.randperm(size, generator=g)] * noise, chosen


def of_distributions(x, g, size):
    rates = x.detach().exp()
    counts = torch.poisson(rates, generator=g) + torch.bernoulli(rates / (1 + rates), generator=g)
    about = torch.normal(x.detach(), rates, generator=g) + torch.normal(0.5, 2.0, (size,), generator=g)
    return x[rates.multinomial(3, generator=g)], counts, about, torch.rand_like(x, generator=g)


def in_place(x, g, size):
    filled = torch.empty(2, size, dtype=torch.float64).t()
    filled[:, 0].normal_(generator=g)
    filled[:, 1].uniform_(-1, 1, generator=g)
    other = torch.empty_like(x).exponential_(generator=g) * torch.empty(size).bernoulli_(0.3, generator=g)
    return x * filled[:, 0] + other, filled


def initialized(x, g, size):
    weight = torch.nn.init.kaiming_uniform_(torch.empty(size, 3), generator=g)
    torch.nn.init.normal_(weight[0], generator=g)
    return x @ weight


def seeded(x, g, size):
    g.manual_seed(size)
    return x * torch.rand(size, generator=g), g


def made_in_the_frame(x, g, size):
    own = torch.Generator(device="cpu")
    first = torch.rand(size, generator=own)
    own.set_state(g.get_state())
    return (
        x * first,
        torch.rand(2, generator=own),
        own,
        str(own.device),
        torch.Generator().manual_seed(2**63 + 5),
    )


def states(x, g, size):
    before = g.get_state()
    first = torch.rand(size, generator=g)
    kept = before.clone()
    before.zero_()
    g.set_state(kept)
    return x * first * torch.rand(size, generator=g), kept


def with_torchs_own(x, g, size):
    first = torch.rand(size) + torch.rand(size, generator=g)
    second = torch.rand(size, generator=torch.default_generator)
    return x * first, second, torch.rand(size, generator=None)


def of_a_module(x, g, size):
    return x * torch.rand(size, generator=of_module), of_module.initial_seed()


def seed_asked_for(x, g, size):
    seed = g.initial_seed()
    return x * seed, g.manual_seed(4).initial_seed()


def in_a_checkpoint(x, g, size):
    def inner(y):
        return (y * torch.rand(size, generator=torch.Generator().manual_seed(1))).sin()

    return checkpoint(inner, x, use_reentrant=False)


def through_a_view_of_an_argument(x, g, size):
    with torch.no_grad():
        x[1:].normal_(generator=g)
    return x * 2


WHOLE = [
    drawn_by_functions, of_distributions, in_place, initialized, seeded, made_in_the_frame, states, with_torchs_own,
    of_a_module, seed_asked_for, in_a_checkpoint, through_a_view_of_an_argument,
]  # fmt: skip


def to_the_point_of_a_break(x, g, size):
    first = torch.rand(size, generator=g)
    gradsplit.graph_break()
    return x * first + torch.rand(size, generator=g)


def drawn_again_in_the_backward(x, g, size):
    return checkpoint(lambda y: (y * torch.rand(size, generator=g)).sin(), x, use_reentrant=False)


def under_autograd(x, g, size):
    return torch.bernoulli(x.sigmoid(), generator=g) + x


def into_out(x, g, size):
    return x * torch.randn(size, generator=g, out=torch.empty(size))


def of_a_new_seed(x, g, size):
    g.seed()
    return x * torch.rand(size, generator=g.manual_seed(size))


def with_numbers_between(x, g, size):
    for _ in range(3):
        x = x + torch.randn(size, generator=g)
        x = x * 2 if x.sum() > 0 else x
    return x


def seen(value):
    if isinstance(value, torch.Generator):
        return value.get_state(), value.initial_seed()
    return [seen(item) for item in value] if isinstance(value, tuple) else value


def run(step, size, seed):
    x, g = torch.linspace(-1, 1, size).requires_grad_(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    result = step(x, g, size)
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    return seen((result, g, x, x.grad, of_module)), torch.get_rng_state()


def check_same(program, backend, *, fullgraph):
    compiled = gradsplit.compile(
        program, backend=backend, fullgraph=fullgraph, options={"fallback_random": True}
    )
    of_module.manual_seed(3)
    expected = [run(program, size, seed) for seed, size in enumerate([20, 20, 21, 22])]
    of_module.manual_seed(3)
    found = [run(compiled, size, seed) for seed, size in enumerate([20, 20, 21, 22])]
    for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        else:
            assert one == other


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
@pytest.mark.parametrize("program", WHOLE)
def test_draws_are_in_the_graph(program, backend, caplog):
    check_same(program, backend, fullgraph=True)
    assert "torch's own kernels" not in caplog.text


@pytest.mark.parametrize(
    "program",
    [
        to_the_point_of_a_break, drawn_again_in_the_backward, under_autograd, into_out, of_a_new_seed,
        with_numbers_between,
    ],
)  # fmt: skip
def test_what_ends_the_graph_is_right(program):
    with pytest.raises(gradsplit.Unsupported):
        run(gradsplit.compile(program, fullgraph=True), 4, 1)
    check_same(program, "aot_eager", fullgraph=False)


def test_open_sizes_need_one_graph():
    counter = gradsplit.testing.CompileCounterWithBackend("aot_eager")
    compiled = gradsplit.compile(drawn_by_functions, backend=counter, fullgraph=True)
    for size in (4, 5, 6, 7):
        compiled(torch.ones(size), torch.Generator(), size)
    assert counter.frame_count == 2


def test_two_names_of_one_generator():
    def program(a, b):
        return torch.rand(2, generator=a), torch.rand(2, generator=b)

    compiled = gradsplit.compile(program, backend="eager", fullgraph=True)
    for same in (False, True, False):
        pairs = []
        for step in (program, compiled):
            a = torch.Generator().manual_seed(1)
            b = a if same else torch.Generator().manual_seed(2)
            pairs.append((step(a, b), a.get_state(), b.get_state()))
        torch.testing.assert_close(*pairs, rtol=0, atol=0)


def test_a_generator_that_becomes_torchs_own():
    def program(g):
        return torch.rand(2), torch.rand(2, generator=g)

    compiled = gradsplit.compile(program, backend="eager", fullgraph=True)
    for own in (False, True):
        pairs = []
        for step in (program, compiled):
            torch.manual_seed(5)
            g = torch.default_generator if own else torch.Generator().manual_seed(1)
            pairs.append((step(g), torch.get_rng_state()))
        torch.testing.assert_close(*pairs, rtol=0, atol=0)


def test_a_graph_that_raises_has_drawn_nothing():
    def program(x, index, g):
        return x[index] * torch.rand(2, generator=g)

    compiled = gradsplit.compile(program, backend="eager", fullgraph=True)
    generator = torch.Generator().manual_seed(1)
    compiled(torch.ones(3), torch.tensor([0, 1]), generator)
    twin = torch.Generator().set_state(generator.get_state())
    for step, given in ((compiled, generator), (program, twin)):
        with pytest.raises(IndexError):
            step(torch.ones(3), torch.tensor([0, 9]), given)
    assert torch.equal(generator.get_state(), twin.get_state())


def test_a_state_that_is_none_raises_as_in_plain_python():
    def program(g):
        g.set_state(torch.zeros(5056, dtype=torch.uint8))
        return torch.rand(2, generator=g)

    for step in (program, gradsplit.compile(program)):
        with pytest.raises(RuntimeError, match="mt19937"):
            step(torch.Generator())
