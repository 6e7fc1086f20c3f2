"""A graph and its inputs as a Python program that fails alone.

Inputs are drawn from a seed where that fails, too; else small ones stand in the program and larger ones beside it, in
``repro.safetensors``.
"""

from __future__ import annotations

import os
import re
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from gradsplit.compile_core.minimizer.repro_inputs import TENSORS

PROGRAM = "repro.py"
_FEW_ELEMENTS = 16


@dataclass(frozen=True)
class Settings:
    """How a program is compiled and what is looked at.

    Attributes:
        backend: a name, or ``module:name`` of a function.
        imports: modules to import first, as those that register a backend.
        after: "capture": the captured graph is compiled. "aot": the graph is forward and backward already, in the
            operators of ATen.
        level: as in ``GRADSPLIT_REPRO_LEVEL``; at 4 results are compared.
        skipped_passes: left out of the compilation.
        options: of the compilation.
        ranks: of a gloo group, each of which compiles and runs the graph.
        dynamic: sizes and integers are symbolic: the first call's program serves the second call, too.
    """

    backend: str
    imports: tuple[str, ...] = ()
    after: str = "capture"
    level: int = 2
    skipped_passes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    dynamic: bool = False


class CannotWriteError(Exception):
    """The graph has something that no text can say."""


def write_repro(
    folder: Path,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Settings,
    says: str,
    drawn: bool = False,
    again: Sequence[Any] | None = None,
) -> Path:
    """Writes the program, and its tensors if there are any, into a folder that is made.

    Args:
        says: what fails, for the program's first lines.
        drawn: inputs are drawn from a seed; see ``repro_inputs.draw``.
        again: inputs of a second call.

    Raises:
        CannotWriteError: the graph has a body of its own, or constants that are no tensors.
    """
    tensors: dict[str, Tensor] = {}
    constants = _constants(module, tensors)
    graph_code = module.graph.python_code("self")
    source = graph_code.src.strip()
    used = set(re.findall(r"\w+", source.partition("\n")[2]))
    lines = [
        f'"""{says}',
        "",
        "Written by gradsplit's minimizer. Run it to see it fail; `python -m gradsplit.minimize` makes it smaller.",
        '"""',
        "",
        "from pathlib import Path",
        "",
        "import torch",
        *_imports({name: value for name, value in graph_code.globals.items() if name in used}),
        "",
        "from gradsplit.minimize import Settings, draw, reproduce, stored",
        "",
        f"SETTINGS = {settings!r}",
        "HERE = Path(__file__).parent",
        "",
        "",
        "class Program(torch.nn.Module):",
    ]
    if constants:
        lines += ["    def __init__(self):", "        super().__init__()", *constants, ""]
    lines += [textwrap.indent(source, "    "), "", ""]
    for name, values in (("input", inputs), ("again", again)):
        if values is not None:
            lines += [f"def {'inputs' if name == 'input' else name}():", "    return ["]
            for k, value in enumerate(values):
                lines.append(f"        {_input_text(f'{name}_{k}', value, tensors, k if drawn else None)},")
            lines += ["    ]", "", ""]
    lines += [
        'if __name__ == "__main__":',
        f"    reproduce(Program(), inputs(), SETTINGS{'' if again is None else ', again()'})",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file(tensors, folder / TENSORS)
    path = folder / PROGRAM
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text("\n".join(lines), encoding="utf-8")
    part.replace(path)
    return path


def _constants(module: fx.GraphModule, tensors: dict[str, Tensor]) -> list[str]:
    lines = []
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(module, name, None)
        if not isinstance(value, Tensor):
            raise CannotWriteError(f"{name} is a {type(value).__name__}")
        lines.append(f"        self.{name} = {_input_text(f'constant_{name}', value, tensors, None)}")
    return sorted(set(lines))


def _imports(names: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, value in names.items():
        if isinstance(value, types.ModuleType):
            if value.__name__ != name:
                lines.append(f"import {value.__name__} as {name}")
            elif name != "torch":
                lines.append(f"import {name}")
            continue
        module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if value in (float("inf"), float("-inf")) or value != value:
            lines.append(f'{name} = float("{value}")')
        elif value is type(None):
            lines.append(f"{name} = type(None)")
        elif module and qualified and "<" not in qualified:
            first, _, rest = qualified.partition(".")
            lines.append(
                f"from {module} import {first}" + ("" if name == first and not rest else f" as _{name}")
            )
            if rest or name != first:
                lines.append(f"{name} = _{name}{'.' if rest else ''}{rest}")
        else:
            raise CannotWriteError(f"{name} is {value!r}, which has no name of its own")
    return lines


def _input_text(name: str, value: Any, tensors: dict[str, Tensor], seed: int | None) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    wanted = ", requires_grad=True" if value.requires_grad else ""
    spec = f"{tuple(value.shape)}, {value.stride()}, {value.dtype}, {str(value.device)!r}"
    if seed is not None:
        return f"draw({seed}, {spec}{wanted})"
    is_small = value.numel() <= _FEW_ELEMENTS and value.dtype != torch.bfloat16
    if is_small and value.is_contiguous() and not value.is_complex() and value.isfinite().all():
        shown = value.detach().cpu().tolist()
        text = f"torch.tensor({shown}, dtype={value.dtype}, device={str(value.device)!r}{wanted})"
        return text if value.numel() else f"{text}.reshape({tuple(value.shape)})"
    tensors[name] = value.detach().contiguous().cpu()
    return f"stored(HERE, {name!r}, {spec}{wanted})"
