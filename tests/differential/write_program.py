"""A random program as Python text: made from a seed, and run with plain PyTorch while it is written.

Since every statement is run as soon as it is written, the writer knows the shapes, dtypes and histories of all tensors;
what raises is taken back and another statement is tried. Now and then what raises stays, as the last statement, so that
exceptions are compared too. The text has ``state()``, which makes equal arguments each time it is called, and
``program(log, *arguments)``; ``compare.py`` says what is done with them.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from tests.differential import pieces
from tests.differential.compare import without_variables
from tests.differential.expressions import read_tables

TABLES = read_tables()
# The settings under which data-dependent sizes stay in a graph.
DATA_SETTINGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
_MOST_ELEMENTS = 300
_LARGEST = 1e5
_TRIES = 12
_NUMBERS = [
    "0",
    "1",
    "2",
    "-1",
    "3",
    "0.5",
    "-1.5",
    "1.25",
    "0.0",
    "1e-3",
    "True",
    "2.0",
    "-0.25",
    "0.75",
    "-2",
]
_NUMBERS += ["float('inf')", "float('nan')"]
_HOLE = r"\{([a-z])\}"
_RESIZE = r"(\w+)\.resize_\((\(.*?\))\)"
_AS_STRIDED = r"(\w+)\.as_strided\((\(.*?\)),(\(.*?\))(?:,(\d+))?\)"


def with_open_sizes(source: str, meanwhile: bool) -> str:
    """A program whose state has other sizes for each of ``SIZES``, and which is compiled once for all of them.

    Args:
        meanwhile: further sizes run with torch's kernels, as they do until they are compiled.
    """
    state, program = source.index("def state"), source.index("def program")

    def scaled(shape: re.Match[str]) -> str:
        return re.sub(r"\b(?!1\b)\d+", r"\g<0> * K", shape[0])

    texts = re.sub(r"(?<=[(, ])\((\d+, ?)*\d*\)", scaled, source[state:program])
    settings = f"SIZES, K, MEANWHILE = (1, 3, 0), 1, {meanwhile}\n"
    return source[:state] + settings + "\n\n" + texts + source[program:]


class ProgramWriter:
    """Writes one program; ``text`` is it."""

    def __init__(self, seed: int, data_sizes: bool = False) -> None:
        self.data_sizes = data_sizes
        self.random = random.Random(seed)
        self.seed = seed
        self.scope: dict[str, Any] = {"torch": torch, "F": F, "log": []}
        self.arguments: list[str] = []
        self.leaves: list[str] = []
        self.header: list[str] = []
        self.state: list[str] = []
        self.body: list[str] = []
        self.named: list[str] = []
        self.indent = "    "
        self.ended = False
        self.random_numbers = self.random.random() < 0.06
        self.hooks = self.random.random() < 0.12

    # ---- names and holes ---------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def name(self) -> str:
        self.named.append(f"t{len(self.named)}")
        return self.named[-1]

    def tensors(self, fits: Any = lambda value: True) -> list[str]:
        found = [n for n, v in self.scope.items() if type(v) is torch.Tensor and fits(v)]
        return (
            found[-9:] if self.chance(0.5) else found
        )  # programs tend to go on with what they have just made

    def pick(self, fits: Any = lambda value: True) -> str:
        found = self.tensors(fits) or self.tensors()
        return self.random.choice(found)

    def number(self) -> str:
        return self.random.choice(_NUMBERS)

    def fill(self, template: str) -> str:
        """The template with something for each hole, which need not fit."""
        float_ = lambda v: v.is_floating_point()  # noqa: E731
        holes = re.findall(_HOLE, template)
        first_hole = next((letter for letter in holes if letter in "xuvnib"), "x")
        fits = {
            "u": lambda v: float_(v) and v.dim() > 0,
            "v": lambda v: float_(v) and v.dim() > 1,
            "i": lambda v: not v.is_floating_point() and v.dtype not in (torch.bool, torch.complex128),
            "b": lambda v: v.dtype == torch.bool,
            "n": lambda v: True,
        }
        first = self.pick(fits.get(first_hole, float_))
        value = self.scope[first]
        chosen = {first_hole: first}
        sides = list(value.shape)

        def other() -> str:
            same = self.tensors(lambda v: float_(v) and (v.shape == value.shape or self.chance(0.2)))
            return self.random.choice(same) if same else first

        def hole(letter: str) -> str:
            if letter in chosen:
                return chosen[letter]
            if letter in "xyz":
                return other()
            if letter in "ibn":
                near = self.tensors(lambda v: fits[letter](v) and v.shape == value.shape)
                return self.random.choice(near) if near and self.chance(0.8) else self.pick(fits[letter])
            if letter in "uv":
                return self.pick(fits[letter])
            if letter in "de":
                dim = self.random.randrange(max(1, len(sides)))
                chosen[letter] = str(dim - len(sides) if sides and self.chance(0.4) else dim)
                return chosen[letter]
            if letter == "w":
                return str(self.random.choice([0, 0, 1, 1, 2, -1]))
            if letter == "h":
                return self.random.choice(
                    [
                        f"({value.numel()},)",
                        f"({value.numel()},1)",
                        "(-1,2)",
                        "(2,-1)",
                        "(1,-1)",
                        f"{tuple(sides[::-1])}",
                        f"{tuple(sides)}",
                    ]
                ).replace("-1", "-1" if "view" in template or "reshape" in template else "1")
            if letter == "g":
                return str(tuple([2] * self.random.choice([0, 1]) + [3 if s == 1 else s for s in sides]))
            return {
                "s": self.number,
                "p": lambda: self.random.choice(["0.5", "1", "2", "1.5", "3"]),
                "k": lambda: self.random.choice(["1", "2", "3", "0", "-1"]),
                "r": lambda: self.random.choice(['"mean"', '"sum"', '"none"']),
                "t": lambda: self.random.choice(
                    ["torch.float64"] * 4
                    + ["torch.float32", "torch.int64", "torch.bool", "torch.int32", "torch.uint8"]
                ),
                "o": lambda: self.random.choice(
                    [
                        "torch.zeros(0,dtype=torch.float64)",
                        f"torch.zeros({tuple(sides)},dtype=torch.float64)",
                        f"torch.zeros({tuple(sides[::-1])},dtype=torch.float64).mT",
                        f"torch.zeros({tuple(sides)},dtype=torch.bool)",
                        "torch.zeros(2,dtype=torch.float64)",
                        self.pick(),
                    ]
                ),
            }[letter]()

        return re.sub(_HOLE, lambda match: hole(match[1]), template)

    def expression(self) -> str:
        weights = {"POINTWISE": 22, "PAIRS": 20, "REDUCTIONS": 15, "VIEWS": 22, "PRODUCTS": 8, "LOSSES": 5}
        if self.random_numbers:
            weights["RANDOM"] = 20
        if self.data_sizes:
            weights["DATA"] = 30
        table = self.random.choices(list(weights), list(weights.values()))[0]
        return self.fill(self.random.choice(TABLES[table]))

    # ---- statements --------------------------------------------------------------------------------------

    def write(self, line: str) -> None:
        self.body.append(self.indent + line)

    def run(self, text: str) -> Exception | None:
        """Runs a statement in the scope; what it raised."""
        if any(self.overreaches(match) for match in re.finditer(_AS_STRIDED, text)) or any(
            self.grows(match) for match in re.finditer(_RESIZE, text)
        ):
            return Exception("memory behind a tensor, which is there or not as kernels please")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(text, self.scope)
        except Exception as error:
            return without_variables(error)
        finally:
            self.scope.pop("__builtins__", None)
        return None

    def overreaches(self, match: re.Match[str]) -> bool:
        """Whether a call of ``as_strided`` reads what no tensor of the program has: storages may be larger."""
        value = self.scope.get(match[1])
        if not isinstance(value, torch.Tensor):
            return False
        whole = value if value._base is None else value._base
        offset = value.storage_offset() if match[4] is None else int(match[4])
        reach = offset + 1 + sum((n - 1) * s for n, s in zip(eval(match[2]), eval(match[3]), strict=True))
        sides = zip(whole.shape, whole.stride(), strict=True)
        return not whole.numel() or reach > whole.storage_offset() + 1 + sum((n - 1) * s for n, s in sides)

    def grows(self, match: re.Match[str]) -> bool:
        """Whether a call of ``resize_`` takes memory that nobody has written."""
        value = self.scope.get(match[1])
        if not isinstance(value, torch.Tensor):
            return False
        held = value.untyped_storage().nbytes() // value.dtype.itemsize
        return value.storage_offset() + math.prod(eval(match[2])) > held

    def add(self, text: str) -> bool:
        """Writes a statement that runs, or now and then one that does not as the last one."""
        error = self.run(text)
        if error is None or (
            self.chance(0.004) and isinstance(error, (RuntimeError, IndexError, ValueError, TypeError))
        ):
            self.write(text)
            self.ended = error is not None
            return True
        return False

    def assign(self) -> bool:
        """``t = expression``, and names for the parts of a tuple."""
        before = list(self.named)
        name = self.name()
        expression = self.expression()
        if self.run(f"{name} = {expression}") is not None or not self.usable(self.scope[name]):
            self.scope.pop(name, None)
            self.named = before
            return False
        self.write(f"{name} = {expression}")
        if isinstance(self.scope[name], (tuple, list)):
            for index in range(min(3, len(self.scope[name]))):
                self.add(f"{self.name()} = {name}[{index}]")
        return True

    def usable(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            if value.numel() > _MOST_ELEMENTS or value.dim() > 5 or value.is_complex():
                return False
            if value.is_floating_point():
                finite = value.detach()[value.detach().isfinite()]
                return finite.numel() == 0 or bool(finite.abs().max() < _LARGEST)
            return True
        if isinstance(value, (tuple, list)):
            return all(self.usable(part) for part in value)
        return value is None or isinstance(value, (bool, int, float, torch.dtype))

    def statement(self) -> None:
        """One statement or block, of those that fit."""
        kind = self.random.choices(
            [self.assign, self.change, self.into_memory, *(k for k, _ in pieces.BLOCKS)],
            [66, 12, 2, *(w for _, w in pieces.BLOCKS)],
        )[0]
        for _ in range(_TRIES):
            if kind(self) if kind.__name__ in pieces.NAMES else kind():
                return

    def change(self) -> bool:
        """Something changes in place, mostly what the program has made."""
        text = self.fill(self.random.choice(TABLES["CHANGES"]))
        target = text.partition(".")[0].partition("[")[0]
        if target in self.arguments and self.chance(0.6):
            return False
        # What cannot be differentiated would raise; and histories of inputs that require gradients are leaves.
        if self.chance(0.15):
            name = self.name()
            if not self.add(f"{name} = {self.fill(self.random.choice(TABLES['VIEWS']))}"):
                return False
            text = text.replace(target, name, 1)
        return self.add(text)

    def into_memory(self) -> bool:
        call = self.fill(self.random.choice(TABLES["OUT"]).replace("{o}", "MEMORY"))
        memory = self.fill("{o}")
        if call.startswith(("torch.mm", "torch.matmul")) and not memory.startswith("torch.zeros"):
            return False  # products read what they have overwritten
        name, where = self.name(), self.name()
        if not self.add(f"{where} = {memory}"):
            return False
        enabled = self.chance(0.2)
        text = f"{name} = {call.replace('MEMORY', where)}"
        with torch.set_grad_enabled(enabled):
            if self.run(text) is not None:
                return False
        self.write(text if enabled else f"with torch.no_grad(): {text}")
        return True

    def block(self, opening: str, statements: int) -> None:
        """``opening`` and a few statements in it."""
        self.write(opening)
        self.indent += "    "
        self.write("pass")
        for _ in range(statements):
            if not self.ended:
                self.statement()
        self.indent = self.indent[:-4]

    # ---- the whole ---------------------------------------------------------------------------------------

    def program(self) -> str:
        torch.manual_seed(self.seed)
        pieces.write_arguments(self)
        for _ in range(self.random.choice([1, 2, 3, 4, 5, 6, 8, 10, 14])):
            if not self.ended:
                self.statement()
        results = self.results()
        options = [
            f"OPTIONS = {self.options()!r}",
            f"BACKWARD = {self.random.choice(['weights', 'weights', 'weights', 'sum', 'grad', 'twice'])!r}",
            f"CHOSEN = {self.random.choice(['all', 'all', 'first', 'last', 'odd'])!r}",
            f"CALLS = {self.random.choice([1, 1, 1, 2])}",
        ]
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "",
                *options,
                "",
                *self.header,
                "",
                "def state():",
                *(f"    {line}" for line in self.state),
                f"    return [{', '.join(self.arguments)}], [{', '.join(self.leaves)}]",
                "",
                "",
                f"def program(log, {', '.join(self.arguments)}):",
                *self.body,
                f"    return {results}",
                "",
            ]
        )

    def options(self) -> dict[str, bool]:
        options = {}
        if self.random_numbers:
            options["fallback_random"] = True
        if self.hooks:
            options["linked_results"] = True
        return options

    def results(self) -> str:
        made = [n for n in self.named if n in self.scope]
        if not made:
            made = list(self.arguments[:1])
        count = min(len(made), self.random.choice([1, 1, 2, 3, 4]))
        chosen = self.random.sample(made[-6:], min(count, len(made[-6:])))
        if made[-1] not in chosen and self.chance(0.7):
            chosen.append(made[-1])
        if self.chance(0.08):
            chosen.append(self.random.choice(self.arguments))
        shape = self.random.random()
        if len(chosen) == 1:
            return chosen[0]
        if shape < 0.1:
            return "[" + ", ".join(chosen) + "]"
        if shape < 0.2:
            return "{" + ", ".join(f"{name!r}: {name}" for name in chosen) + "}"
        return ", ".join(chosen)


def write_program(seed: int, data_sizes: bool = False) -> str:
    """The program of a seed; the same text for the same torch.

    Args:
        data_sizes: with sizes that depend on data, which the compilation keeps in its graphs.
    """
    source = ProgramWriter(seed, data_sizes).program()
    if not data_sizes:
        return source
    state = source.index("def state")
    return f"{source[:state]}SETTINGS = {DATA_SETTINGS}\n\n\n{source[state:]}"
