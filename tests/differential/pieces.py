"""Parts of random programs that are more than one expression: arguments, modules, functions, blocks, breaks, hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.differential.write_program import ProgramWriter

FUNCTIONS = {
    "Scale": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor
    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 0.5, None
""",
    "Saved": """
class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y.sin()
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        left = (g * y.sin()).sum_to_size(x.shape) if ctx.needs_input_grad[0] else None
        right = (g * x * y.cos()).sum_to_size(y.shape) if ctx.needs_input_grad[1] else None
        return left, right
""",
    "Pair": """
class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        a, b = x.exp().clamp(max=5.0), (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(b)
        ctx.save_for_backward(a)
        return a, b
    @staticmethod
    def backward(ctx, g, unused):
        a, = ctx.saved_tensors
        return g * a
""",
    "Undefined": """
class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x * 2, y * 3
    @staticmethod
    def backward(ctx, g, h):
        return (None if g is None else g * 2), (None if h is None else h * 3)
""",
    "Changed": """
class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x
    @staticmethod
    def backward(ctx, g):
        return g * 2
""",
    "Modern": """
class Modern(torch.autograd.Function):
    @staticmethod
    def forward(x, k):
        return x.tanh() * k, x.sum()
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.k = inputs[1]
    @staticmethod
    def backward(ctx, g, h):
        x, = ctx.saved_tensors
        return g * (1 - x.tanh() ** 2) * ctx.k + h, None
""",
    "Through": """
class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)
""",
}
_APPLY = {
    "Scale": "Scale.apply({x}, {s})",
    "Saved": "Saved.apply({x}, {y})",
    "Pair": "Pair.apply({x})",
    "Undefined": "Undefined.apply({x}, {y})",
    "Changed": "Changed.apply({x} * 1)",
    "Modern": "Modern.apply({x}, {p})",
    "Through": "Through.apply({x})",
}

HELPER = """
def helper(u, *others, scale=2.0, **named):
    total = u * scale
    for o in others:
        total = total + o.sum()
    named['log'].append(len(others))
    return total, {'u': u}
"""

MODULES = {
    "Norm": """
class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width, dtype=torch.float64)
        self.linear = torch.nn.Linear(width, 3, dtype=torch.float64)
    def forward(self, x):
        return self.linear(self.norm(x))
""",
    "Counts": """
class Counts(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        self.seen += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.reshape(-1, x.shape[-1]).mean(0), alpha=0.1)
        return x * self.weight - self.mean * self.calls
""",
    "Blocks": """
class Blocks(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, dtype=torch.float64) for _ in range(2))
        self.norm = torch.nn.LayerNorm(width, dtype=torch.float64)
        self.drop = torch.nn.Dropout(0.0)
        self.last = None
    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(F.gelu(layer(self.norm(x))))
        self.last = x.detach()
        return x
""",
    "Replaced": """
class Replaced(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), 0.5, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(width, dtype=torch.float64))
        self.frozen = torch.nn.Parameter(torch.ones(width, dtype=torch.float64), requires_grad=False)
    def forward(self, x):
        self.last = (x.detach() * self.frozen).reshape(-1, x.shape[-1]).amax(0)
        if not self.training:
            return x * self.last
        return F.layer_norm(x, x.shape[-1:], self.weight, self.frozen)
""",
    "Images": """
class Images(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 2, 3, padding=1, dtype=torch.float64)
        self.norm = torch.nn.BatchNorm1d(2, momentum=None, dtype=torch.float64)
    def forward(self, x):
        x = x.reshape(-1, 1, x.shape[-1])
        return F.max_pool1d(self.norm(self.conv(x)).relu(), 2, ceil_mode=True)
""",
}


def write_arguments(writer: ProgramWriter) -> None:
    """Tensors of several shapes, dtypes, layouts and histories, and now and then a module."""
    writer.state.append(f"g = torch.Generator().manual_seed({writer.random.randrange(10**6)})")
    rows, columns = writer.random.choice(
        [(2, 3), (3, 4), (4, 2), (1, 3), (2, 2), (5, 1), (3, 3), (2, 4), (3, 2), (4, 4), (2, 5), (0, 2)]
    )
    shapes = [(rows, columns), (rows, columns), (columns,), (rows, 1), (), (2, rows, columns), (1, columns)]
    shapes += [(columns, rows), (1,), (0, columns)]
    lines: list[str] = []
    for index in range(writer.random.choice([2, 3, 3, 4])):
        shape = (rows, columns) if index == 0 else writer.random.choice(shapes)
        lines += _tensor(writer, "abcd"[index], shape)
    if writer.chance(0.5):
        shape = writer.random.choice(shapes[:5])
        lines.append(f"i = torch.randint(-2, 3, {shape}, generator=g)")
        writer.arguments.append("i")
    if writer.chance(0.4):
        lines.append(f"m = torch.rand({writer.random.choice(shapes[:5])}, generator=g) > 0.4")
        writer.arguments.append("m")
    if writer.chance(0.08) and not writer.leaves:
        lines.append("v = a[:1]")
        writer.arguments.append("v")
    if writer.chance(0.3):
        kind = writer.random.choice(list(MODULES))
        writer.header += [MODULES[kind].strip(), ""]
        lines += ["torch.manual_seed(5)", f"net = {kind}({columns})"]
        if writer.chance(0.3):
            lines.append("net.eval()")
        writer.arguments.append("net")
    writer.state += lines
    for text in writer.header:
        writer.run(text)
    writer.run("\n".join(writer.state))
    writer.scope.pop("g", None)
    for name in writer.leaves:  # the program does not see what its arguments are views of
        if name not in writer.arguments:
            writer.scope.pop(name, None)


def _tensor(writer: ProgramWriter, name: str, shape: tuple[int, ...]) -> list[str]:
    dtype = writer.random.choice(["torch.float64"] * 12 + ["torch.float32"])
    layout = writer.random.choice(["plain"] * 5 + ["turned", "sliced", "expanded", "flat"])
    if layout == "turned" and len(shape) > 1:
        turned = (*shape[:-2], shape[-1], shape[-2])
        text = f"torch.randn({turned}, dtype={dtype}, generator=g).mT"
    elif layout == "sliced" and shape:
        text = f"torch.randn({(*shape[:-1], shape[-1] * 2)}, dtype={dtype}, generator=g)[..., ::2]"
    elif layout == "expanded" and shape:
        text = f"torch.randn({(1, *shape[1:])}, dtype={dtype}, generator=g).expand({shape})"
    elif layout == "flat":
        text = f"torch.randint(-2, 3, {shape}, generator=g).to({dtype})"
    else:
        layout = "plain"
        text = f"torch.randn({shape}, dtype={dtype}, generator=g)"
    lines = [f"{name} = {text}"]
    # Some of torch's float32 kernels have other results at infinity where they take vectors than single numbers.
    if (
        dtype == "torch.float64"
        and layout in ("plain", "flat")
        and writer.chance(0.12)
        and shape
        and 0 not in shape
    ):
        value = writer.random.choice(["nan", "inf", "-inf"])
        lines.append(f"{name}.view(-1)[{writer.random.choice(['0', '-1', '::2'])}] = float({value!r})")
    writer.arguments.append(name)
    if writer.chance(0.75):
        lines.append(f"{name}.requires_grad_()")
        writer.leaves.append(name)
        if writer.chance(0.15):  # an argument with a history
            lines[-1:] = [
                f"{name}0 = {name}.requires_grad_()",
                f"{name} = {name}0{writer.random.choice([' + 0', '.view_as(' + name + '0)', '.clone()', '[...]'])}",
            ]
            writer.leaves[-1] = f"{name}0"
    return lines


# ---- blocks: each writes something and returns whether it fitted -----------------------------------------


def call_function(writer: ProgramWriter) -> bool:
    kind = writer.random.choice(list(FUNCTIONS))
    text = FUNCTIONS[kind].strip()
    if text not in writer.header:
        writer.header += [text, ""]
        writer.run(text)
    before = list(writer.named)
    name = writer.name()
    if not writer.add(f"{name} = {writer.fill(_APPLY[kind])}"):
        writer.named = before
        return False
    if isinstance(writer.scope.get(name), tuple):
        for index in range(2):
            writer.add(f"{writer.name()} = {name}[{index}]")
    return True


def call_module(writer: ProgramWriter) -> bool:
    if "net" not in writer.arguments:
        return False
    before = list(writer.named)
    if writer.add(f"{writer.name()} = net({writer.fill('{u}')})"):
        return True
    writer.named = before
    return False


def break_graph(writer: ProgramWriter) -> bool:
    text = writer.random.choice(
        [
            "print(end='')",
            "print(end='')",
            "torch._C._get_tracing_state() or print(end='')",
            "log.append(float({x}.detach().sum()))",
            "log.append({n}.sum().item())",
            "log.append({x}.tolist())",
            "log.append(id(log) > 0)",
        ]
    )
    return writer.add(writer.fill(text))


def record(writer: ProgramWriter) -> bool:
    text = writer.random.choice(
        [
            "log.append('here')",
            "log.append(tuple({x}.shape))",
            "log.append({n}.requires_grad)",
            "log.append(str({n}.dtype))",
            "log.append({n}.is_contiguous())",
            "log.append({x}.stride())",
            "log.append({x}.is_leaf)",
            "log.append({x})",
            "log.append({x}.detach())",
            "log.append({n}.dim())",
            "log.append({x} is {x})",
            "log.append({x}.grad_fn is None)",
            "log.append({x}.storage_offset())",
        ]
    )
    return writer.add(writer.fill(text))


def forget(writer: ProgramWriter) -> bool:
    names = [n for n in writer.named if n in writer.scope]
    if len(names) < 3:
        return False
    name = writer.random.choice(names)
    if writer.indent != "    ":
        return False
    writer.write(f"del {name}")
    del writer.scope[name]
    return True


def without_grad(writer: ProgramWriter) -> bool:
    enabled = writer.chance(0.2)
    opening = "with torch.enable_grad():" if enabled else "with torch.no_grad():"
    if writer.chance(0.15) and not enabled:
        opening = "with torch.set_grad_enabled(False):"
    with torch.set_grad_enabled(enabled):
        writer.block(opening, writer.random.choice([1, 1, 2]))
    return True


def branch(writer: ProgramWriter) -> bool:
    condition = writer.fill(
        writer.random.choice(
            [
                "{x}.sum() > 0",
                "float({x}.detach().mean()) < 0.1",
                "{x}.requires_grad",
                "{x}.dim() > 1",
                "{x}.shape[0] == 2",
                "bool(({x} > 0).any())",
                "{n}.is_floating_point()",
                "{i}.any()",
            ]
        )
    )
    if writer.run(f"_taken = bool({condition})") is not None:
        return False
    taken = writer.scope.pop("_taken")
    # The other branch is not run; what is there stands for itself.
    writer.block(f"if {condition}:" if taken else f"if not ({condition}):", writer.random.choice([1, 2, 3]))
    if writer.chance(0.4) and not writer.ended:
        writer.write("else:")
        writer.write("    log.append('other')")
    return True


def loop(writer: ProgramWriter) -> bool:
    name = writer.name()
    start = writer.fill("{x}")
    step = writer.random.choice(
        [
            "{name} = {name} * 0.5 + {{y}}",
            "{name} = {name}.sin() + k",
            "{name} = ({name} + k * 0.1).relu()",
            "{name} = torch.where({name} > 0, {name} * 0.5, {name} - k)",
        ]
    ).format(name=name)
    lines = [f"{name} = {start}", f"for k in range({writer.random.choice([2, 3])}):"]
    inner = [writer.fill(step)]
    if writer.chance(0.25):
        inner.append(
            writer.random.choice(["print(end='')", "log.append(k)", f"if k == 1 and {name}.sum() > 0: break"])
        )
    text = "\n".join([*lines, *(f"    {line}" for line in inner)])
    if writer.run(text) is not None or not writer.usable(writer.scope[name]):
        writer.scope.pop(name, None)
        return False
    writer.scope.pop("k", None)
    for line in text.split("\n"):
        writer.write(line)
    return True


def attempt(writer: ProgramWriter) -> bool:
    failing = writer.random.choice(
        [
            "{u}.view(7, 11)",
            "{x}.reshape(-1, 13)",
            "{x} + torch.ones(17)",
            "{u}[99]",
            "{x}.missing",
            "[][0]",
            "{x}.detach().requires_grad_().add_(1)",
        ]
    )
    writer.block("try:", 1)
    if writer.ended:
        writer.write("finally:")
        writer.write("    log.append('left')")
        return True
    writer.write("    " + writer.fill(failing))
    handled = writer.random.choice(["Exception", "(RuntimeError, IndexError, AttributeError)"])
    writer.write(f"except {handled} as error:")
    writer.write("    log.append(type(error).__name__)")
    return True


def add_hook(writer: ProgramWriter) -> bool:
    if not writer.hooks:
        return False
    text = writer.random.choice(
        [
            "{x}.register_hook(lambda g: log.append(('hook', g.clone())))",
            "{x}.register_hook(lambda g: g * 2)",
            "{x}.register_hook(lambda g: None)",
            "{x}.retain_grad()",
        ]
    )
    return writer.add(writer.fill(text))


def inner_gradient(writer: ProgramWriter) -> bool:
    """Of what the program made; without the option, results are siblings to autograd, as documented."""
    if not writer.hooks:
        return False
    name = writer.name()
    text = writer.fill("{name}, = torch.autograd.grad({x}.sin().sum(), [{x}])".replace("{name}", name))
    return writer.add(text)


def call_helper(writer: ProgramWriter) -> bool:
    text = HELPER.strip()
    if text not in writer.header:
        writer.header += [text, ""]
        writer.run(text)
    name = writer.name()
    return writer.add(writer.fill(f"{name} = helper({{x}}, {{y}}, {{x}}, scale={{s}}, log=log)[0]"))


def use_closure(writer: ProgramWriter) -> bool:
    name = writer.name()
    text = writer.random.choice(
        [
            "{name} = (lambda u, k={{s}}: u * k + {{y}})({{x}})",
            "{name} = sum([u * k for k, u in enumerate([{{x}}, {{y}}])])",
            "{name} = max([{{x}}, {{x}}], key=lambda u: u.dim())",
            "{name} = torch.stack([u.sum() for u in ({{x}}, {{y}}, {{z}})])",
            "{name} = {{'a': {{x}}, 'b': {{y}}}}.get('b')",
            "{name} = [*{{u}}][-1]",
            "{name} = next(iter({{u}}))",
            "{name} = torch.func.vmap(lambda u: u.sin())({{u}})",
            "{name} = torch.utils.checkpoint.checkpoint(lambda u: u.sin() * {{y}}, {{x}}, use_reentrant=False)",
        ]
    ).format(name=name)
    return writer.add(writer.fill(text))


BLOCKS = [
    (call_function, 4),
    (call_module, 6),
    (break_graph, 5),
    (record, 3),
    (forget, 2),
    (without_grad, 4),
    (branch, 3),
    (loop, 2),
    (attempt, 1),
    (add_hook, 3),
    (inner_gradient, 2),
    (call_helper, 1),
    (use_closure, 2),
]
NAMES = {kind.__name__ for kind, _ in BLOCKS}
