"""``__torch_function__`` of classes and modes of the program: they are asked what plain Python asks them, in order."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import gradsplit

log: list[object] = []


class Default(torch.Tensor):
    """Without anything of its own: what torch gives is of the class again."""


class Logging(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        log.append((getattr(func, "__name__", None), [kind.__name__ for kind in types]))
        return super().__torch_function__(func, types, args, kwargs)


class Louder(Logging):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        log.append("louder")
        return super().__torch_function__(func, types, args, kwargs)


class Unit(torch.Tensor):
    """A tensor that says what it counts, as one with physical units does."""

    @staticmethod
    def __new__(cls, data, unit):
        return torch.as_tensor(data).as_subclass(cls)

    def __init__(self, data, unit):
        self.unit = unit

    @property
    def doubled(self):
        return self * 2

    def __add__(self, other):
        if isinstance(other, Unit) and other.unit != self.unit:
            raise TypeError(f"{self.unit} and {other.unit}")
        return super().__add__(other)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs)
        units = [arg.unit for arg in args if isinstance(arg, Unit) and "unit" in vars(arg)]
        if isinstance(made, Unit) and units:
            made.unit = units[0]
        return made


HANDLED = {}


def implements(function):
    def register(implementation):
        HANDLED[function] = implementation
        return implementation

    return register


class Masked(torch.Tensor):
    """Answers some functions by others, and leaves the class, as ``torchvision``'s image classes do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in HANDLED:
            return HANDLED[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@implements(torch.sum)
def _sum(x, dim=None):
    return x.as_subclass(torch.Tensor).mean()


@implements(torch.nn.functional.relu)
def _relu(x, inplace=False):
    return x.as_subclass(torch.Tensor).clamp(max=0).as_subclass(Masked)


class Leaves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3).as_subclass(Logging))
        self.register_buffer("shift", torch.randn(3).as_subclass(Logging))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight) + self.shift


def refuses(a, b):
    try:
        return a + b
    except TypeError as error:
        return str(error)


def _of(cls, *shape, **options):
    return torch.randn(*shape or (2, 3), **options).as_subclass(cls)


# Programs with what makes their arguments.
PROGRAMS = {
    "operators": (lambda x: ((x * 2).sin(), 2 - x, -x, x == x, x**2, 1 / x, abs(x)), lambda: [_of(Logging)]),
    "default": (lambda x: (x + 1, x.max(0), x.split(1)), lambda: [_of(Default)]),
    "attributes": (
        lambda x: (x.shape, x.mT, x.dtype, x.size(), len(x), x.requires_grad),
        lambda: [_of(Logging)],
    ),
    "items": (
        lambda x: (x[0], list(x), x[..., 1]),
        lambda: [_of(Logging)],
    ),
    "functions": (
        lambda x: (torch.nn.functional.relu(x).softmax(-1), torch.cat([x, x]), torch.stack((x, x), dim=1)),
        lambda: [_of(Logging)],
    ),
    "mixed": (
        lambda x, y: (y + x, torch.add(x, y), y.clone().add_(x)),
        lambda: [_of(Logging), torch.ones(2, 3)],
    ),
    "subclasses first": (lambda a, b: (a + b, torch.mul(b, a)), lambda: [_of(Logging), _of(Louder)]),
    "made": (
        lambda x: (x.as_subclass(Logging) * 2, Default(x) + 1),
        lambda: [torch.ones(3, requires_grad=True)],
    ),
    "left": (lambda x: (x.as_subclass(Logging) * 2).as_subclass(torch.Tensor), lambda: [torch.ones(3)]),
    "units": (
        lambda x: (Unit(x, "m") * 2, Unit(x, "s").sum(), Unit(x, "kg").doubled),
        lambda: [torch.ones(3)],
    ),
    "units that were there": (
        lambda x: (x * 2, x.unit, x.doubled, x + x),
        lambda: [Unit(torch.ones(3), "m")],
    ),
    "units that differ": (refuses, lambda: [Unit(torch.ones(3), "m"), Unit(torch.ones(3), "s")]),
    "handled": (lambda x: (torch.sum(x), torch.nn.functional.relu(x), x * 2), lambda: [_of(Masked)]),
    "module": (lambda module, x: module(x), lambda: [Leaves(), torch.ones(2, 3)]),
    "parameter": (
        lambda x: (x * 2, isinstance(x, torch.nn.Parameter)),
        lambda: [torch.nn.Parameter(_of(Logging))],
    ),
    "asked": (
        lambda x, y: (
            torch.overrides.has_torch_function((x, y)),
            torch.overrides.has_torch_function_unary(y),
        ),
        lambda: [_of(Logging), torch.ones(2)],
    ),
}


def _leaves(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _parameters(arguments):
    owners = [argument for argument in arguments if isinstance(argument, torch.nn.Module)]
    found = [parameter for owner in owners for parameter in owner.parameters()]
    return found + [leaf for leaf in arguments if isinstance(leaf, torch.Tensor) and leaf.is_leaf]


def _run(function, make):
    torch.manual_seed(0)
    arguments = make()
    log.clear()
    results = function(*arguments)
    seen = list(log)
    with torch._C.DisableTorchFunctionSubclass():
        losses = [leaf.sum() for leaf in _leaves(results) if leaf.requires_grad]
        if losses:
            sum(losses).backward()
        shown = [(type(leaf), vars(leaf), leaf.requires_grad, leaf.tolist()) for leaf in _leaves(results)]
        gradients = [(type(leaf.grad), leaf.grad) for leaf in _parameters(arguments)]
        gradients = [(kind, None if grad is None else grad.tolist()) for kind, grad in gradients]
    others = [leaf for leaf in torch.utils._pytree.tree_leaves(results) if not isinstance(leaf, torch.Tensor)]
    return seen, shown, others, gradients


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_plain(name, backend):
    program, make = PROGRAMS[name]
    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    for _ in range(2):
        assert _run(compiled, make) == _run(program, make)


def test_changes_of_what_was_there():
    def change(x):
        x.add_(1)
        x.unit = "cm"
        x[0] = 5
        return x

    for function in (change, gradsplit.compile(change, fullgraph=True, backend="eager")):
        x = Unit(torch.ones(3), "m")
        assert function(x) is x and x.unit == "cm"
        assert torch.equal(x.as_subclass(torch.Tensor), torch.tensor([5.0, 2.0, 2.0]))


def test_another_class_is_captured_anew():
    compiled = gradsplit.compile(lambda x: x * 2, fullgraph=True, backend="eager")
    for cls in (Default, Logging, torch.Tensor, Default):
        assert type(compiled(torch.ones(2).as_subclass(cls))) is cls


def test_classes_are_not_asked_where_the_program_says_so():
    def program(x):
        with torch._C.DisableTorchFunctionSubclass():
            inside = x * 2
        return inside, x * 2

    results = gradsplit.compile(program, fullgraph=True, backend="eager")(_of(Logging))
    assert [type(result) for result in results] == [torch.Tensor, Logging]
    compiled = gradsplit.compile(lambda x: x * 2, backend="eager")
    with torch._C.DisableTorchFunctionSubclass():
        assert type(compiled(_of(Logging))) is torch.Tensor
    assert type(compiled(_of(Logging))) is Logging


@pytest.mark.parametrize("read", [lambda x: x.is_leaf, lambda x: x.grad, lambda x: x.grad_fn])
def test_the_history_of_what_was_there_is_left_to_python(read):
    compiled = gradsplit.compile(lambda x: (x * 2, read(x)), backend="eager")
    x = torch.nn.Parameter(_of(Default))
    assert compiled(x)[1] == read(x)
    assert compiled.break_reasons[0].reason_id == "tensor-subclass"


def test_a_graph_break_beside_objects_of_classes():
    def program(x):
        made = Unit(x, "m") * 2
        print(end="")
        return made + made, made.unit

    compiled = gradsplit.compile(program, backend="eager")
    for _ in range(2):
        assert _run(compiled, lambda: [torch.ones(3)]) == _run(program, lambda: [torch.ones(3)])
    assert len(compiled.break_reasons) == 1


def test_a_view_of_a_class_is_no_leaf():
    compiled = gradsplit.compile(lambda x: (x * 2, x.as_subclass(Default).is_leaf), backend="eager")
    assert compiled(torch.ones(2, requires_grad=True))[1] is False


def test_nobody_answers():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    compiled = gradsplit.compile(torch.neg, backend="eager")
    with pytest.raises(TypeError, match="__torch_function__"):
        compiled(_of(Refusing))


class Scaled(TorchFunctionMode):
    def __init__(self, factor, seen):
        super().__init__()
        self.factor = factor
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func in (torch.sin, torch.Tensor.sin) else result


BODIES = {
    "operators": lambda x: x.sin() + torch.sin(x) * 2 - 1 / x + x**2,
    "what makes tensors": lambda x: torch.ones(3) + torch.arange(3, device=x.device) + x.new_zeros(3),
    "attributes": lambda x: x.shape[0] + x.view(3, 1).mT.sum(-1),
    "items": lambda x: next(row * 2 for row in x.view(3, 1)) + x[1:].sum(),
    "functions": lambda x: torch.nn.functional.softmax(torch.nn.functional.linear(x, x.view(1, 3)), 0),
    "gradients": lambda x: torch.no_grad()(lambda: x.sin())(),
    "operators by name": lambda x: torch.ops.aten.add(x, 1),
    "subclass": lambda x: x.as_subclass(Default).sin(),
}


@pytest.mark.parametrize("name", BODIES)
def test_nested_modes(name):
    body = BODIES[name]

    def program(x):
        with Scaled(2, []) as outer, Scaled(3, []) as inner:
            result = body(x)
            changed = x.clone()
            changed[0] = 7
            changed += 1
        return result, changed, outer.seen, inner.seen, body(x)

    compiled = gradsplit.compile(program, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert _run(compiled, lambda: [torch.randn(3)]) == _run(program, lambda: [torch.randn(3)])


@pytest.mark.parametrize(
    "body",
    [
        lambda x: float(x.sum()) * x,
        lambda x: x * len(x),
        lambda x: torch.vmap(lambda row: row * 2)(x),
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: torch.zeros(3, device=torch.device("cpu")) + x,
    ],
)
def test_what_a_mode_would_see_otherwise_ends_the_graph(body):
    def program(x):
        with Scaled(2, []) as mode:
            result = body(x)
        return result, mode.seen

    compiled = gradsplit.compile(program, backend="eager")
    assert _run(compiled, lambda: [torch.ones(3)]) == _run(program, lambda: [torch.ones(3)])
    assert compiled.break_reasons


def test_what_a_function_of_map_stops_with_ends_the_loop():
    def program(x):
        def stop(item):
            if item > 1:
                raise StopIteration
            return item

        return [x * item for item in map(stop, range(4))]

    compiled = gradsplit.compile(program, fullgraph=True, backend="eager")
    assert len(compiled(torch.ones(2))) == len(program(torch.ones(2))) == 2
