"""The rules for how the source is cut: import directions, layers, file sizes.

Every rule is a function from the parsed modules to a list of ``file:line: what broke which rule``. Nothing is
imported: the modules are read with ``ast``, and a package that does not exist is simply absent.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("bucketing", "compile_core", "distributed", "launch")
OURS = (*PACKAGES, "gradsplit", "examples", "tests")

# What each package may import of the others, as module prefixes; here they are called as their folders are, and
# `gradsplit` is what the folder of that name adds to them.
GIVE_WAY = "gradsplit.give_way"
PACKAGE_EDGES: dict[str, tuple[str, ...]] = {
    "launch": (GIVE_WAY,),
    "compile_core": (GIVE_WAY,),
    "bucketing": (GIVE_WAY,),
    "distributed": ("compile_core", "bucketing", GIVE_WAY),
    "gradsplit": ("compile_core", "bucketing", "distributed"),
}

# What each member of compile_core may import of its siblings. `compile_core` is the package's own __init__.
BASE = ("errors", "config", "options", "artifact_logs", "run_record", "rare_collections", "ir", "torch_facts")
STAGES = ("capture", "autograd", "lowering", "runtime", "backends", "observe")
COMPILE_CORE_EDGES: dict[str, tuple[str, ...]] = {
    "errors": (),
    "config": ("errors",),
    "options": ("errors",),
    "artifact_logs": ("options", "run_record"),
    "run_record": ("options",),
    "rare_collections": (),
    "torch_facts": ("errors",),
    "ir": ("errors", "options", "torch_facts"),
    "toolchain": BASE,
    "guard_checks": (*BASE, "toolchain"),
    "capture": (*BASE, "guard_checks", "toolchain"),
    "autograd": BASE,
    "lowering": (*BASE, "toolchain"),
    "runtime": (*BASE, "toolchain"),
    "observe": BASE,
    "passes": (*BASE, "autograd", "lowering", "observe"),
    "backends": (*BASE, "toolchain", "autograd", "lowering", "runtime", "observe", "passes"),
    "many_sizes": (*BASE, "autograd", "backends", "capture", "observe", "runtime"),
    "pipeline": (*BASE, *STAGES, "many_sizes", "passes"),
    "compiled_calls": (*BASE, "capture", "guard_checks", "observe"),
    "export": (*BASE, "capture", "compiled_calls", "guard_checks"),
    "minimizer": (*BASE, "backends"),
    "interface": (*BASE, *STAGES, "many_sizes", "pipeline", "compiled_calls", "minimizer"),
    "compile_core": (),
}

# The same of `distributed`: its parts are one idea each, and the files beside them put them together.
PARTS = ("agreement", "collectives", "optimizer_steps", "gradients", "reducer", "planning")
DISTRIBUTED_EDGES: dict[str, tuple[str, ...]] = {
    "clocks": ("streams",),
    "doctor": (),
    "ddp_module": (),
    "group_backend": (),
    "streams": (),
    "agreement": (),
    "collectives": ("clocks", "group_backend", "streams"),
    "reducer": ("ddp_module", "gradients"),
    "optimizer_steps": ("collectives", "streams"),
    "gradients": ("collectives", "optimizer_steps", "streams"),
    "planning": ("collectives", "gradients", "reducer"),
    "ddp_options": ("collectives",),
    "eligibility": ("ddp_module", "group_backend", "reducer"),
    "graph_forms": ("agreement", "planning"),
    "in_graph_way": (*PARTS, "ddp_module", "ddp_options", "graph_forms"),
    "reducer_way": ("agreement", "ddp_module", "eligibility", "reducer"),
    "compile_ddp": (
        "agreement",
        "gradients",
        "ddp_module",
        "ddp_options",
        "eligibility",
        "in_graph_way",
        "reducer_way",
    ),
    "explaining": ("clocks", "compile_ddp", "ddp_module", "planning", "reducer"),
    "compile_core_plugin": ("explaining", "reducer"),
    "pipeline": ("group_backend", "agreement"),
    "distributed": ("compile_ddp", "ddp_options", "explaining", "pipeline"),
}

# The same of `compile_core.capture`.
CAPTURE_EDGES: dict[str, tuple[str, ...]] = {
    "directives": (),
    "run_only": (),
    "guards": (),
    "code_objects": (),
    "values": ("guards",),
    "open_numbers": ("guards", "values"),
    "graph": ("open_numbers", "values"),
    "object_model": ("code_objects", "directives", "values"),
    "numpy_arrays": ("open_numbers", "values"),
    "operations": ("numpy_arrays", "object_model", "open_numbers", "values"),
    "frames": ("code_objects", "object_model", "operations", "values"),
    "torch_rules": ("object_model", "open_numbers", "run_only", "values"),
    "higher_order_calls": ("graph", "object_model", "torch_rules", "values"),
    "python_rules": ("frames", "numpy_arrays", "object_model", "open_numbers", "operations", "values"),
    "directive_rules": ("directives", "higher_order_calls", "object_model", "torch_rules", "values"),
    "rule_files": (
        "frames",
        "higher_order_calls",
        "numpy_arrays",
        "operations",
        "python_rules",
        "torch_rules",
    ),
    "wrap": (
        "directive_rules",
        "directives",
        "numpy_arrays",
        "object_model",
        "open_numbers",
        "operations",
        "python_rules",
        "torch_rules",
        "values",
    ),
    "state": (
        "frames",
        "graph",
        "higher_order_calls",
        "object_model",
        "open_numbers",
        "operations",
        "python_rules",
        "rule_files",
        "torch_rules",
        "values",
        "wrap",
    ),
    "reconstruct": (
        "graph",
        "object_model",
        "open_numbers",
        "values",
    ),
    "graph_breaks": ("code_objects", "directives", "frames", "object_model", "reconstruct", "values"),
    "capture_frame": (
        "code_objects",
        "frames",
        "graph",
        "graph_breaks",
        "object_model",
        "open_numbers",
        "reconstruct",
        "state",
        "torch_rules",
        "values",
        "wrap",
    ),
    "capture": (
        "capture_frame",
        "graph_breaks",
        "object_model",
        "open_numbers",
        "run_only",
        "torch_rules",
        "values",
    ),
}

# The same of `compile_core.lowering`.
LOWERING_EDGES: dict[str, tuple[str, ...]] = {
    "decompositions": (),
    "nests": (),
    "graph_to_loops": ("nests",),
    "tiling": ("nests",),
    "fusion": ("nests", "tiling"),
    "cpp_kernels": ("nests", "tiling"),
    "triton_kernels": ("nests", "tiling"),
    "build": ("cpp_kernels", "nests", "triton_kernels"),
    "products": ("build", "cpp_kernels", "nests", "tiling", "triton_kernels"),
    "attention": ("graph_to_loops", "tiling"),
    "lowering": (),
}

# The same of `compile_core.autograd`: the files beside its parts trace a whole graph, and bodies inside it.
AUTOGRAD_EDGES: dict[str, tuple[str, ...]] = {
    "captured_graphs": ("operators",),
    "operators": (),
    "tracing": ("captured_graphs", "operators"),
    "rewrites": ("operators",),
    "partitioning": ("operators",),
    "bound_graphs": ("operators",),
    "control_flow": ("captured_graphs", "partitioning", "tracing"),
    "flex_attention": ("captured_graphs", "control_flow", "tracing"),
    "trace_joint": ("captured_graphs", "control_flow", "flex_attention", "operators", "rewrites", "tracing"),
    "autograd": (),
}

LAYERS = {
    "compile_core": COMPILE_CORE_EDGES,
    "compile_core.autograd": AUTOGRAD_EDGES,
    "compile_core.capture": CAPTURE_EDGES,
    "compile_core.lowering": LOWERING_EDGES,
    "distributed": DISTRIBUTED_EDGES,
}
# Those whose arrows are exact: each that is listed is used.
EXACT_LAYERS = ("compile_core.autograd", "compile_core.capture", "compile_core.lowering", "distributed")

# The compilers inside torch, which this project does without, and the one file that may use them.
FOREIGN_COMPILERS = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd",
    "torch._functorch.partitioners",
)
FOREIGN_COMPILER_BRIDGE = "compile_core/backends/inductor.py"

# The one door to private names of torch, and those that are as stable as public ones and stand everywhere.
DOOR = "compile_core.torch_facts"
STABLE_NAMES = (
    "torch._decomp",
    "torch._ops",
    "torch._subclasses.fake_tensor",
    "torch.ops",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree",
)

OPTIONAL_PACKAGES = ("triton", "mpi4py", "matplotlib")
MAXIMUM_LINES = 500
LONG_TABLES: frozenset[str] = frozenset()  # declarative tables may be longer: list them here
FORBIDDEN_FILE_NAMES = ("utils.py", "util.py")


@dataclass(frozen=True)
class Import:
    """One import; of ``from a import b`` the ``target`` is ``a.b`` if that is a module, else ``a``."""

    target: str
    line: int
    in_function: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    line_count: int
    tree: ast.Module
    imports: tuple[Import, ...]


def within(name: str, prefix: str) -> bool:
    """Whether the dotted ``name`` is ``prefix`` or inside it."""
    return name == prefix or name.startswith(prefix + ".")


def nodes_with_function_depth(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    yield node, in_function
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from nodes_with_function_depth(child, inside)


def folder_name(name: str) -> str:
    """`compile_core.ir` of `gradsplit.compile_core.ir`."""
    below = name.removeprefix("gradsplit.")
    return below if below.partition(".")[0] in PACKAGES else name


def read_imports(tree: ast.Module, package: str, module_names: frozenset[str]) -> Iterator[Import]:
    """All imports of a module whose package (itself, for an ``__init__``) is ``package``."""
    for node, in_function in nodes_with_function_depth(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(folder_name(alias.name), node.lineno, in_function)
        elif isinstance(node, ast.ImportFrom):
            base = folder_name(node.module or "")
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                member = folder_name(f"{base}.{alias.name}")
                # A name taken from a package of ours is a module only when there is such a file; of packages
                # that are not ours the longer name is kept, so that `from torch import _dynamo` is seen.
                is_module = member in module_names or base.split(".")[0] not in OURS
                yield Import(member if is_module else base, node.lineno, in_function)


def read_modules(root: Path) -> list[Module]:
    """The modules under ``root`` of `gradsplit` and its four packages, parsed; those that do not exist are left out."""
    files: dict[str, Path] = {}
    for path in sorted((root / "gradsplit").glob("*.py")):
        files["gradsplit" if path.stem == "__init__" else f"gradsplit.{path.stem}"] = path
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    names = frozenset(files)
    modules = []
    for name, path in files.items():
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source, filename=str(path))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imports = tuple(read_imports(tree, package, names))
        modules.append(Module(name, path.relative_to(root).as_posix(), source.count("\n"), tree, imports))
    return modules


def layer_of(module_name: str, package: str) -> str:
    """`ir` of `compile_core.ir.schedule` in `compile_core`; `compile_core` of the package itself."""
    below = module_name.removeprefix(package).split(".")
    return below[1] if len(below) > 1 else package.rpartition(".")[2]


def layer_arrows(modules: list[Module], package: str) -> Iterator[tuple[Module, Import, str, str]]:
    """The imports between the layers of a package, each with the layer that imports and the one that is imported."""
    for module in modules:
        if not within(module.name, package):
            continue
        layer = layer_of(module.name, package)
        for item in module.imports:
            if within(item.target, package) and layer_of(item.target, package) != layer:
                yield module, item, layer, layer_of(item.target, package)


def check_package_directions(modules: list[Module]) -> list[str]:
    broken = []
    for module in modules:
        package = module.name.split(".")[0]
        for item in module.imports:
            other = item.target.split(".")[0]
            if other == package or other not in OURS:
                continue
            allowed = PACKAGE_EDGES[package]
            if not any(within(item.target, prefix) for prefix in allowed):
                may = ", ".join(allowed) or "nothing of ours"
                broken.append(
                    f"{module.path}:{item.line}: imports {item.target}, but {package} may import {may}"
                )
    return broken


def check_one_import_name(modules: list[Module]) -> list[str]:
    broken = []
    for module in modules:
        for node in ast.walk(module.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            broken += [
                f"{module.path}:{node.lineno}: imports {name}, which is gradsplit.{name}"
                for name in names
                if name.partition(".")[0] in PACKAGES
            ]
    return broken


def check_layers(modules: list[Module]) -> list[str]:
    broken = []
    for package, edges in LAYERS.items():
        table = f"{package.rpartition('.')[2].upper()}_EDGES"
        for module in modules:
            if within(module.name, package) and layer_of(module.name, package) not in edges:
                layer = layer_of(module.name, package)
                broken.append(f"{module.path}:1: {package}.{layer} is not declared in {table}")
        for module, item, layer, other in layer_arrows(modules, package):
            if layer in edges and other not in edges[layer]:
                may = ", ".join(edges[layer]) or "no sibling"
                broken.append(
                    f"{module.path}:{item.line}: imports {item.target}, but {layer} may import {may}"
                )
    return broken


def check_no_imports_inside_functions(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:{item.line}: imports {item.target} in a function; ours are imported at module level"
        for module in modules
        for item in module.imports
        if item.in_function and item.target.split(".")[0] in OURS
    ]


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain on a plain name; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def check_no_foreign_compiler(modules: list[Module]) -> list[str]:
    broken = []
    for module in modules:
        if module.path == FOREIGN_COMPILER_BRIDGE:
            continue
        imported = {
            (item.target, item.line)
            for item in module.imports
            if any(within(item.target, prefix) for prefix in FOREIGN_COMPILERS)
        }
        # Of a chain torch._dynamo.a.b the part torch._dynamo is a node of its own, so each use is found once.
        used = {
            (dotted_name(node), node.lineno)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and dotted_name(node) in FOREIGN_COMPILERS
        }
        for name, line in sorted(imported | used, key=lambda use: use[1]):
            broken.append(f"{module.path}:{line}: uses {name}; only {FOREIGN_COMPILER_BRIDGE} may")
    return broken


def check_acyclic(modules: list[Module]) -> list[str]:
    graph = networkx.DiGraph()
    names = {module.name for module in modules}
    for module in modules:
        for item in module.imports:
            if item.target in names and item.target != module.name:
                graph.add_edge(module.name, item.target, place=f"{module.path}:{item.line}")
    broken = []
    for component in networkx.strongly_connected_components(graph):
        if len(component) > 1:
            cycle = networkx.find_cycle(graph.subgraph(component))
            steps = " ".join(f"{graph.edges[a, b]['place']}: {a} imports {b};" for a, b in cycle)
            broken.append(f"{steps} imports may not form a cycle")
    return broken


def check_optional_packages_in_one_place(modules: list[Module]) -> list[str]:
    broken = []
    for package in OPTIONAL_PACKAGES:
        lines = {
            module.path: item.line
            for module in modules
            for item in module.imports
            if within(item.target, package)
        }
        if len(lines) > 1:
            places = ", ".join(f"{path}:{line}" for path, line in sorted(lines.items()))
            broken.append(f"{places}: import {package}; an optional package is imported in one file")
    return broken


def check_file_sizes(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:{module.line_count}: longer than {MAXIMUM_LINES} lines; look for its second concept"
        for module in modules
        if module.line_count > MAXIMUM_LINES and module.path not in LONG_TABLES
    ]


def names_of_torch(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a file names of torch, dotted, where it imports it and where it reads attributes of what it imports."""
    imported = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if within(full, "torch"):
                    imported[alias.asname or alias.name] = full
                    yield full, node.lineno
    within_longer: set[ast.AST] = set()
    for node in ast.walk(tree):  # from the outside inwards
        parts: list[str] = []
        place: ast.AST = node
        while isinstance(place, ast.Attribute) and place not in within_longer:
            within_longer.add(place)
            parts.insert(0, place.attr)
            place = place.value
        if parts and isinstance(place, ast.Name) and place.id in imported:
            yield ".".join([imported[place.id], *parts]), node.lineno


def is_private(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def check_one_door(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:{line}: {name} is private to torch; look it up in {DOOR}, with what happens without it"
        for module in modules
        if not within(module.name, DOOR) and module.path != FOREIGN_COMPILER_BRIDGE
        for name, line in sorted(set(names_of_torch(module.tree)))
        if is_private(name) and not any(within(name, stable) for stable in STABLE_NAMES)
    ]


def check_file_names(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:1: a file is named after its one concept, so not {Path(module.path).name}"
        for module in modules
        if Path(module.path).name in FORBIDDEN_FILE_NAMES
    ]


CHECKS: tuple[Callable[[list[Module]], list[str]], ...] = (
    check_package_directions,
    check_one_import_name,
    check_layers,
    check_no_imports_inside_functions,
    check_no_foreign_compiler,
    check_one_door,
    check_acyclic,
    check_optional_packages_in_one_place,
    check_file_sizes,
    check_file_names,
)


@pytest.fixture(scope="module")
def source() -> list[Module]:
    return read_modules(ROOT)


@pytest.mark.xdist_group("source")  # one worker reads it once
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_source_keeps_the_rule(check, source):
    broken = check(source)
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.xdist_group("source")
@pytest.mark.parametrize("package", EXACT_LAYERS)
def test_every_arrow_is_used(package, source):
    used = {(layer, other) for _, _, layer, other in layer_arrows(source, package)}
    listed = {(layer, other) for layer, others in LAYERS[package].items() for other in others}
    assert listed - used == set()


# Each rule can fail: a small tree that breaks exactly it, and the place that the message must name.
BROKEN_TREES = [
    (check_package_directions, {"launch/a.py": "import gradsplit.bucketing\n"}, "launch/a.py:1:"),
    (
        check_package_directions,
        {"bucketing/a.py": "from gradsplit.compile_core import api\n"},
        "bucketing/a.py:1:",
    ),
    (check_package_directions, {"distributed/a.py": "\nimport tests.conftest\n"}, "distributed/a.py:2:"),
    (
        check_package_directions,
        {"distributed/a.py": "from gradsplit import compile\n"},
        "distributed/a.py:1:",
    ),
    (check_one_import_name, {"launch/a.py": "import launch.cli\n"}, "launch/a.py:1:"),
    (check_one_import_name, {"launch/a.py": "from launch import cli\n"}, "launch/a.py:1:"),
    (
        check_layers,
        {
            "compile_core/ir/a.py": "from gradsplit.compile_core import pipeline\n",
            "compile_core/pipeline.py": "",
        },
        "compile_core/ir/a.py:1:",
    ),
    (
        check_layers,
        {"compile_core/lowering/nests/a.py": "from ...runtime import b\n", "compile_core/runtime/b.py": ""},
        "compile_core/lowering/nests/a.py:1:",
    ),
    (check_layers, {"compile_core/ir/a.py": "import gradsplit.compile_core\n"}, "compile_core/ir/a.py:1:"),
    (check_layers, {"compile_core/novelty.py": ""}, "compile_core/novelty.py:1:"),
    (
        check_layers,
        {
            "distributed/reducer/a.py": "from gradsplit.distributed.planning.b import x\n",
            "distributed/planning/b.py": "",
        },
        "distributed/reducer/a.py:1:",
    ),
    (check_layers, {"distributed/novelty.py": ""}, "distributed/novelty.py:1:"),
    (
        check_layers,
        {
            "compile_core/capture/values/a.py": "from gradsplit.compile_core.capture.frames import b\n",
            "compile_core/capture/frames/b.py": "",
        },
        "compile_core/capture/values/a.py:1:",
    ),
    (check_layers, {"compile_core/capture/novelty.py": ""}, "compile_core/capture/novelty.py:1:"),
    (
        check_layers,
        {
            "compile_core/lowering/cpp_kernels/a.py": "from gradsplit.compile_core.lowering.triton_kernels import b\n",
            "compile_core/lowering/triton_kernels/b.py": "",
        },
        "compile_core/lowering/cpp_kernels/a.py:1:",
    ),
    (check_layers, {"compile_core/lowering/novelty.py": ""}, "compile_core/lowering/novelty.py:1:"),
    (
        check_layers,
        {
            "compile_core/autograd/partitioning/a.py": "from gradsplit.compile_core.autograd.rewrites import b\n",
            "compile_core/autograd/rewrites/b.py": "",
        },
        "compile_core/autograd/partitioning/a.py:1:",
    ),
    (check_layers, {"compile_core/autograd/novelty.py": ""}, "compile_core/autograd/novelty.py:1:"),
    (
        check_no_imports_inside_functions,
        {"distributed/a.py": "def f():\n    import gradsplit.bucketing\n"},
        "distributed/a.py:2:",
    ),
    (check_no_foreign_compiler, {"launch/a.py": "from torch import _dynamo\n"}, "launch/a.py:1:"),
    (check_no_foreign_compiler, {"launch/a.py": "import torch._inductor.config\n"}, "launch/a.py:1:"),
    (check_no_foreign_compiler, {"launch/a.py": "import torch\ntorch._dynamo.reset()\n"}, "launch/a.py:2:"),
    (
        check_acyclic,
        {"launch/a.py": "from gradsplit.launch.b import x\n", "launch/b.py": "from . import a\n"},
        "launch/a.py:1:",
    ),
    (
        check_optional_packages_in_one_place,
        {"launch/a.py": "import mpi4py\n", "launch/b.py": "from mpi4py import MPI\n"},
        "launch/a.py:1, launch/b.py:1:",
    ),
    (check_one_door, {"launch/a.py": "import torch\n\ntorch._C.x\n"}, "launch/a.py:3:"),
    (check_one_door, {"launch/a.py": "from torch.nn.modules import _x\n"}, "launch/a.py:1:"),
    (check_file_sizes, {"launch/a.py": "\n" * 501}, "launch/a.py:501:"),
    (check_file_names, {"launch/utils.py": ""}, "launch/utils.py:1:"),
]


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


@pytest.mark.parametrize(("check", "files", "place"), BROKEN_TREES)
def test_rule_catches_its_breach(tmp_path, check, files, place):
    write_tree(tmp_path, files)
    broken = check(read_modules(tmp_path))
    assert len(broken) == 1
    assert place in broken[0]


def test_rules_allow_what_they_should(tmp_path):
    files = {
        "gradsplit/__init__.py": "from gradsplit.compile_core.interface.api import compile\n",
        "compile_core/interface/api.py": "from gradsplit.compile_core import pipeline\n",
        "compile_core/pipeline.py": "from gradsplit.compile_core.backends import inductor\n",
        "compile_core/backends/__init__.py": "",
        "compile_core/backends/inductor.py": "from torch._inductor import compile_fx\n",
        "bucketing/__init__.py": "from .plan import plan\n",
        "bucketing/plan.py": "def plan():\n    import matplotlib\n",
        "distributed/compile_ddp.py": "import gradsplit.bucketing, gradsplit.compile_core\n",
    }
    write_tree(tmp_path, files)
    modules = read_modules(tmp_path)
    assert [message for check in CHECKS for message in check(modules)] == []
