"""One program, run in plain PyTorch and compiled: everything that can be seen of both is noted and compared.

A program is a file with ``state()``, which makes equal arguments each time, ``program(log, *arguments)``, and what is
to be done with it: ``OPTIONS`` and ``SETTINGS`` of the compilation, how often it is called, which results get
gradients, in which way. Where it has ``SIZES``, its state depends on which of them ``K`` is, and it is compiled once
for all.
``python -m tests.differential.compare FILE...`` checks files.
"""

from __future__ import annotations

import linecache
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradsplit
from gradsplit.compile_core.backends import compile_elsewhere

_RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_RELATIVE |= {torch.complex128: 1e-9, torch.complex64: 2e-5}
# What is left to luck (an index of a median of equal elements) differs in few runs of plain PyTorch.
_RUNS_OF_A_FINDING = 8


def _shake(dtype: torch.dtype) -> float:
    """How far a result is moved, relatively, where a program is shaken: at least by its last bit."""
    return max(_RELATIVE.get(dtype, 1e-9) / 1e3, torch.finfo(dtype).eps)


# Operators whose results are exact, so that ties and zeros stay what they are where a program is shaken.
_EXACT = frozenset(
    [
        "abs",
        "neg",
        "relu",
        "maximum",
        "minimum",
        "max",
        "min",
        "amax",
        "amin",
        "where",
        "clamp",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "copy_",
        "clone",
        "_to_copy",
        "fill_",
        "zero_",
        "zeros",
        "ones",
        "full",
        "arange",
        "sort",
        "topk",
        "kthvalue",
        "cat",
        "stack",
        "index",
        "gather",
        "scatter",
        "index_select",
        "flip",
        "roll",
        "masked_fill",
        "masked_fill_",
        "masked_select",
        "median",
        "mode",
        "argmax",
        "argmin",
        "empty",
        "zeros_like",
        "ones_like",
        "repeat",
        "constant_pad_nd",
        "new_zeros",
        "detach",
        "lift_fresh",
        "tril",
        "triu",
        "embedding",
        "max_pool2d_with_indices",
        "index_put",
        "index_put_",
        "empty_like",
        "add",
        "add_",
        "mul",
        "sub",
    ]
)

# What works element by element without saying so.
_POINTWISE = frozenset(
    {f"{name}_backward" for name in ["elu", "hardtanh", "hardswish", "leaky_relu", "hardsigmoid"]}
)

# Torch's kernels of these compute with a constant of 32 bits in float64, too.
_COARSE = frozenset({"hardsigmoid_backward"})


# Torch calls hooks of all results of an operator when a gradient comes to one of them; those of a compiled graph are
# not called where none comes.
_CALLS_WITH_NOTHING = "calls of hooks without a gradient"


# A run of plain PyTorch.
Run = Callable[[], dict[str, Any]]

# More than there are calls.
_AFTER_ALL = 1000


@dataclass(frozen=True)
class Verdict:
    """What came of a program.

    ``kind`` is "same", "skipped", "lenient" (eager alone raises), "sensitive" (eager differs as much by rounding), or
    what differs, and then a finding.
    """

    kind: str
    detail: str = ""
    operators: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_finding(self) -> bool:
        return self.kind not in ("same", "skipped", "lenient", "sensitive")


# Below a mode torch's other kernels read the memory that zeros without memory do not have, and crash.
_OF_ZEROS_WITHOUT_MEMORY = frozenset(["add", "add_", "sub", "mul", "div", "copy_"])


def _with_memory(value: Any) -> Any:
    is_without = isinstance(value, torch.Tensor) and value._is_zerotensor()
    return torch.zeros(value.shape, dtype=value.dtype) if is_without else value


_SUMS = frozenset(["sum", "mean", "add", "sub", "cumsum", "dot", "mv", "mm", "addmm", "bmm"])


# What these give is how far their terms are from a mean, over a deviation, whose inverse comes last but for bytes.
_NORMS = frozenset(
    [
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "native_layer_norm",
        "native_group_norm",
    ]
)


def _last_bits(terms: Any, dtype: torch.dtype) -> float:
    """What a sum of these may be off by, however small it is, as its terms are added in another order."""
    sizes = [_largest(term) for term in terms if isinstance(term, torch.Tensor)]
    return max(sizes, default=0.0) * _shake(dtype)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """To the nearest number that is far from the next one in comparison with last bits."""
    mantissa, exponent = torch.frexp(tensor.double())
    steps = 2.0 ** round(-math.log2(_shake(tensor.dtype)) - 3)
    return torch.ldexp((mantissa * steps).round() / steps, exponent).to(tensor.dtype)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.detach()[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


class _Counting(TorchDispatchMode):
    """Notes the operators and the coarsest floats of a run; with ``shake`` it moves results by some last bits, those
    of sums by some of their terms'.

    With ``whole_vectors``, operators compute no element as one that is left over behind the last whole vector, which
    torch's kernels do in another way (elu's gradient at NaN, say). With ``without_remainders``, sums whose terms cancel
    out are 0, where another order of the terms may leave some last bits of these, and results that differ by such bits
    are equal.
    """

    def __init__(
        self, shake: int | None = None, whole_vectors: bool = False, without_remainders: bool = False
    ) -> None:
        super().__init__()
        self._without_remainders = without_remainders
        self._whole_vectors = whole_vectors
        self.operators: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self._generator = None if shake is None else torch.Generator().manual_seed(shake)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        are_tensors = all(isinstance(value, torch.Tensor) for value in arguments)
        if not ((name in _OF_ZEROS_WITHOUT_MEMORY and are_tensors) or function.is_view):
            arguments = [_with_memory(value) for value in arguments]
        result = function(*arguments, **(named or {}))
        self.operators.add(name)
        if self._whole_vectors and (torch.Tag.pointwise in function.tags or name in _POINTWISE):
            self._compute_again(function, result, arguments, named or {})
        parts = result if isinstance(result, (tuple, list)) else [result]
        for part in parts:
            if isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex()):
                self.dtypes.add(part.dtype)
                is_new = not any(part is argument for argument in arguments) and not function.is_view
                # Torch's zeros without memory cannot be written.
                is_new = is_new and not part._is_zerotensor()
                last = 0.0
                if is_new and name in _SUMS and part.is_floating_point():
                    last = _last_bits(arguments, part.dtype)
                if name in _NORMS and part is parts[0]:
                    last = _last_bits(arguments[:1], part.dtype) * _largest(parts[2])
                if self._generator is not None and is_new and name not in _EXACT:
                    self._move(part, last)
                is_written = not (function.is_view or part._is_zerotensor() or name in _EXACT)
                if self._generator is not None and is_written and part.is_floating_point():
                    self._draw_bits(part)
                if self._without_remainders and is_new and part.is_floating_point() and name not in _EXACT:
                    part.copy_(torch.where(part.abs() < last, 0.0, _rounded(part)))
        return result

    def _compute_again(self, function: Any, result: Any, arguments: Any, named: Any) -> None:
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        is_one = isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel()
        if not is_one or not tensors or function._schema.is_mutable or result._is_zerotensor():
            return
        many = [
            value.expand(result.shape).expand(64, *result.shape).contiguous()
            if isinstance(value, torch.Tensor)
            else value
            for value in arguments
        ]
        result.copy_(function(*many, **named)[0])

    def _move(self, value: torch.Tensor, last: float) -> None:
        noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
        torch.ops.aten.mul_.Tensor(value, (1 + noise * _shake(value.dtype)).to(value.dtype))
        if last:
            value.add_((noise * last).to(value.dtype))

    def _draw_bits(self, value: torch.Tensor) -> None:
        """Sign and other bits of what is no number, which kernels leave to the order of operands, and to luck."""
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[value.element_size()]
        free = 2 ** (round(-math.log2(torch.finfo(value.dtype).eps)) - 1)
        drawn = torch.randint(-free, free, value.shape, generator=self._generator)
        nan = torch.full(value.shape, math.nan, dtype=value.dtype)
        other = (nan.view(bits) | drawn.abs().to(bits)).view(value.dtype).copysign(drawn.to(value.dtype))
        value.copy_(torch.where(value.isnan(), other, value))


# ---- running -------------------------------------------------------------------------------------------


def load(source: str, name: str = "<program>", size: int = 1) -> dict[str, Any]:
    """The names that a program's text defines; ``size`` is which of its sizes its state will have."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict[str, Any] = {"__name__": "program_of_the_test"}
    exec(compile(source, name, "exec"), namespace)
    if "SIZES" in namespace:
        namespace["K"] = size
    return namespace


def observe(
    namespace: Mapping[str, Any], wrap: Callable[[Any], Any] = lambda function: function
) -> dict[str, Any]:
    """What can be seen of a run, by name, in an order of importance."""
    seen: dict[str, Any] = {}
    log: list[Any] = []
    program = wrap(namespace["program"])
    arguments, leaves = namespace["state"]()
    torch.manual_seed(99)
    for call in range(namespace["CALLS"]):
        try:
            result = program(log, *arguments)
            for part in _tensors(result):
                part.grad_fn  # noqa: B018  a view whose base has changed since may be an error to whoever asks
        except Exception as error:
            seen[f"call {call} raises"] = without_variables(error)
            _note_log(seen, log)
            return seen
        known = [*_tensors(arguments), *leaves]
        _note(seen, f"result {call}", result, known)
        try:
            _backward(namespace, _tensors(result), leaves, seen, call)
        except Exception as error:
            seen[f"backward {call} raises"] = without_variables(error)
            return seen
        for index, part in enumerate(_tensors(result)):
            if part.retains_grad:
                _note(seen, f"gradient of result {call} {index}", part.grad)
    _note(seen, "argument", arguments)
    for index, leaf in enumerate(leaves):
        _note(seen, f"leaf {index}", leaf)
        _note(seen, f"gradient {index}", leaf.grad)
    for module in (argument for argument in arguments if isinstance(argument, torch.nn.Module)):
        for name, parameter in module.named_parameters():
            _note(seen, f"gradient of {name}", parameter.grad)
    _note_log(seen, log)
    _note(seen, "random state", torch.get_rng_state())
    _change(seen, _tensors(result), [*_tensors(arguments), *leaves])
    return seen


def _change(seen: dict[str, Any], results: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    """What a change of each of the last call's results, under autograd, does to what else there is."""
    factor = torch.full((), 2.0, requires_grad=True)
    for index, result in enumerate(results):
        # Torch fails an assertion where a second result of a node, which a compiled call is, retains its gradient.
        if not result.is_floating_point() or result.retains_grad:
            continue
        try:
            result.mul_(factor)
            for k, tensor in enumerate([*results, *given]):
                _note(seen, f"tensor {k} after change {index}", tensor)
                seen[f"tensor {k} after change {index} history"] = tensor.grad_fn is not None
        except RuntimeError as error:
            seen[f"change {index} raises"] = error
            return


def _backward(
    namespace: Mapping[str, Any],
    results: list[torch.Tensor],
    leaves: list[torch.Tensor],
    seen: dict[str, Any],
    call: int,
) -> None:
    results = [r for r in results if r.requires_grad]
    picks = {"all": slice(None), "first": slice(1), "last": slice(-1, None), "odd": slice(1, None, 2)}
    results = results[picks[namespace["CHOSEN"]]] or results
    if not results:
        return
    weights = [
        (torch.arange(r.numel(), dtype=torch.float64).cos() + 1.5).reshape(r.shape).to(r.dtype)
        for r in results
    ]
    way = namespace["BACKWARD"]
    if way == "sum":
        sum(r.sum().abs() if r.is_complex() else r.sum() for r in results).backward()
    elif way == "grad":
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(results, wanted, weights, allow_unused=True) if wanted else ()
        for index, gradient in enumerate(found):
            _note(seen, f"gradient asked for by {call} {index}", gradient)
    else:
        torch.autograd.backward(results, weights, retain_graph=way == "twice")
        if way == "twice":
            torch.autograd.backward(results, weights)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, those of modules too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return list(value.state_dict(keep_vars=True).values())
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _note(seen: dict[str, Any], name: str, value: Any, known: list[torch.Tensor] | None = None) -> None:
    """Adds what can be seen of a value; ``known`` are tensors that it may be, or share memory with."""
    if isinstance(value, torch.Tensor):
        _note_tensor(seen, name, value, known)
    elif isinstance(value, torch.nn.Module):
        state = {**value.state_dict(keep_vars=True), **dict(value.named_buffers())}
        plain = {k: v for k, v in vars(value).items() if k in ("calls", "last", "training")}
        _note(seen, f"{name} state", {**state, **plain})
    elif isinstance(value, dict):
        seen[f"{name} type"] = (type(value).__name__, list(map(str, value)))
        for key, part in value.items():
            _note(seen, f"{name}.{key}", part, known)
    elif isinstance(value, (list, tuple)):
        seen[f"{name} type"] = (type(value).__name__, len(value))
        for index, part in enumerate(value):
            _note(seen, f"{name}[{index}]", part, known)
            if known is not None and isinstance(part, torch.Tensor):
                known = [*known, part]
    elif isinstance(value, (float, complex)):
        seen[f"{name} value"] = torch.tensor(value)
    else:
        seen[f"{name} value"] = value if isinstance(value, (int, str, type(None))) else str(value)


def _note_log(seen: dict[str, Any], log: list[Any]) -> None:
    """What the program logged, and its hooks: how their gradients lie in memory is left open, as that of others."""
    hooks = [isinstance(entry, tuple) and bool(entry) and entry[0] == "hook" for entry in log]
    nothing = [is_hook and entry[1] is None for entry, is_hook in zip(log, hooks, strict=True)]
    seen["log length"] = len(log) - sum(nothing)
    for index, (entry, is_hook) in enumerate(zip(log, hooks, strict=True)):
        if not is_hook:
            _note(seen, f"log[{index - sum(nothing[:index])}]", entry)
        elif entry[1] is not None:
            _note(seen, f"gradient of a hook, log[{index - sum(nothing[:index])}]", entry[1])
    seen[_CALLS_WITH_NOTHING] = sum(nothing)


def _note_tensor(
    seen: dict[str, Any], name: str, value: torch.Tensor, known: list[torch.Tensor] | None
) -> None:
    seen[f"{name} dtype"] = str(value.dtype)
    seen[f"{name} shape"] = tuple(value.shape)
    if not name.startswith("gradient"):
        seen[f"{name} requires_grad"] = value.requires_grad
    if value.layout is not torch.strided:
        value = value.detach().to_dense()
    elif not name.startswith("gradient"):
        sides = zip(value.shape, value.stride(), strict=True)
        seen[f"{name} strides"] = tuple(s for n, s in sides if n > 1) if value.numel() else ()
    copy = value.detach().clone()
    seen[f"{name} value"] = copy.resolve_conj().resolve_neg()
    if known is not None:
        seen[f"{name} leaf"] = value.is_leaf
        seen[f"{name} is"] = next((i for i, other in enumerate(known) if other is value), None)
        if value.layout is torch.strided and value.numel():
            place = value.untyped_storage().data_ptr()
            shares = [
                i
                for i, other in enumerate(known)
                if other.layout is torch.strided
                and place == other.untyped_storage().data_ptr()
                and other.numel()
            ]
            # A result need not lie in the memory of what it was computed from, as it does in plain PyTorch at times.
            offset = value.storage_offset() - known[shares[0]].storage_offset() if shares else None
            seen[f"{name} shares memory with"] = (shares, offset)


# ---- comparing -----------------------------------------------------------------------------------------


def check(source: str, name: str = "<program>") -> Verdict:
    """Runs a program both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _check(source, name)
        except Exception:  # the comparison itself failed
            return Verdict("not compared", traceback.format_exc()[-600:])


def run_plainly(source: str) -> None:
    """Runs a program as often as ``check`` does with plain PyTorch, which may crash."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in load(source).get("SIZES", (1,)):
            for _ in range(3):
                observe(load(source, size=size))


def _check(source: str, name: str) -> Verdict:
    namespace = load(source, name)
    gradsplit.reset()
    settings = namespace.get("SETTINGS")
    with gradsplit.config.patch(settings) if settings else nullcontext():
        return _check_loaded(source, name, namespace)


def _check_loaded(source: str, name: str, namespace: dict[str, Any]) -> Verdict:
    options = dict(namespace["OPTIONS"])
    if "SIZES" not in namespace:
        compiled = gradsplit.compile(namespace["program"], options=options)
        return _check_size(source, name, 1, namespace, compiled)
    # Sizes differ; in the end all is as in the beginning.
    options["compile_elsewhere"] = namespace["MEANWHILE"]
    compiled = gradsplit.compile(namespace["program"], options=options, dynamic=True)
    kinds: list[Verdict] = []
    # Programs of further sizes never arrive.
    with mock.patch.object(compile_elsewhere._jobs, "submit", lambda job: Future()):
        for size in namespace["SIZES"]:
            namespace["K"] = size
            try:
                namespace["state"]()
            except Exception:  # there is no such state of this size
                continue
            kinds.append(_check_size(source, name, size, namespace, compiled))
            if kinds[-1].is_finding:
                return replace(kinds[-1], detail=f"size {size}: {kinds[-1].detail}")
    same = next((verdict for verdict in kinds if verdict.kind == "same"), kinds[0])
    return replace(same, operators=frozenset().union(*(verdict.operators for verdict in kinds)))


def _check_size(
    source: str, name: str, size: int, namespace: Mapping[str, Any], function: Callable[..., Any]
) -> Verdict:
    """Runs a program both ways; ``function`` is the compiled one of ``namespace``."""

    def run() -> dict[str, Any]:
        return observe(load(source, name, size))

    counting = _Counting()
    with counting:
        run()
    relative = max([_RELATIVE.get(dtype, 0.1) for dtype in counting.dtypes], default=1e-9)
    shake = max(map(_shake, counting.dtypes), default=_shake(torch.float64))
    if counting.operators & _COARSE:
        relative = max(relative, 1e-7)
    eager = run()
    compiled = observe(namespace, lambda _: function)
    verdict = _difference(eager, compiled, relative)
    if verdict.is_finding:
        raised = _raised(compiled)
        if raised is not None:
            words = "".join(traceback.format_exception(raised[1]))
            verdict = Verdict(verdict.kind, f"{verdict.detail}\n{words[-1500:]}")
        where = verdict.detail.partition(":")[0]
        if any(_difference(eager, run(), relative).is_finding for _ in range(_RUNS_OF_A_FINDING)):
            verdict = Verdict("skipped", "plain PyTorch differs from itself")
        elif _reads_unwritten_memory(run, eager, relative):
            verdict = Verdict("skipped", "plain PyTorch reads memory that nobody wrote")
        elif _is_of_last_elements(run, compiled, relative) or (
            verdict.kind.endswith(("value", "shape"))
            and _is_sensitive(run, eager, compiled, relative, min(100.0, relative / shake), where)
        ):
            verdict = Verdict("sensitive", verdict.detail)
    return Verdict(verdict.kind, verdict.detail, frozenset(counting.operators))


def _raised(seen: Mapping[str, Any]) -> tuple[str, Exception] | None:
    return next(((k, v) for k, v in seen.items() if k.endswith("raises")), None)


def _moment(raises: str) -> tuple[int, bool]:
    """When a run raised, for comparison: in the call of this number, in the backward after it, or after all."""
    kind, number, _ = raises.split()
    return (_AFTER_ALL if kind == "change" else 0) + int(number), kind == "backward"


def _difference(eager: Mapping[str, Any], compiled: Mapping[str, Any], relative: float) -> Verdict:
    wanted, found = _raised(eager), _raised(compiled)
    if wanted is not None and found is not None and wanted[0] != found[0]:
        if _moment(found[0]) > _moment(wanted[0]):
            return Verdict("lenient", f"{wanted[0]}: {_line(wanted[1])}")
        return Verdict(
            "exception", f"eager {wanted[0]}: {_line(wanted[1])}; compiled {found[0]}: {_line(found[1])}"
        )
    if found is not None and wanted is None:
        return Verdict(
            f"raises {type(found[1]).__name__}", f"{found[0]}: {_line(found[1])} (eager does not raise)"
        )
    for name, value in eager.items():
        if name.endswith("raises"):
            if found is None:
                return Verdict("lenient", f"{name}: {_line(value)}")
            if type(value) is not type(found[1]) or name != found[0]:
                raised = f"eager {type(value).__name__} {_line(value)}; {type(found[1]).__name__} {_line(found[1])}"
                return Verdict("exception", f"{name}: {raised}")
            return Verdict("same")
        if name == _CALLS_WITH_NOTHING and compiled.get(name, 0) < value:
            continue
        if name not in compiled:
            return Verdict("lenient" if found is None else "exception", f"{name}: missing")
        if not _equal(value, compiled[name], relative):
            words = name.split()
            return Verdict(
                f"{words[0]} {words[-1]}", f"{name}: eager {_short(value)}, compiled {_short(compiled[name])}"
            )
    extra = [name for name in compiled if name not in eager]
    return Verdict("more", f"{extra[0]}: only compiled") if extra else Verdict("same")


def _equal(wanted: Any, found: Any, relative: float) -> bool:
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return type(wanted) is type(found) and wanted == found
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(wanted, found)
    if wanted.is_complex():
        wanted, found = torch.view_as_real(wanted), torch.view_as_real(found)
    wanted, found = wanted.double(), found.double()
    return torch.allclose(found, wanted, rtol=relative, atol=relative * _size(wanted), equal_nan=True)


def _size(value: torch.Tensor) -> float:
    finite = value[value.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def _reads_unwritten_memory(run: Run, eager: Mapping[str, Any], relative: float) -> bool:
    """Whether plain PyTorch gives something else where torch writes no numbers into all memory that it makes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _difference(eager, run(), relative).is_finding
    finally:
        torch.use_deterministic_algorithms(False)


def _is_of_last_elements(run: Run, compiled: Mapping[str, Any], relative: float) -> bool:
    """Whether plain PyTorch gives the same where no element is left over behind the last whole vector."""
    with _Counting(whole_vectors=True):
        eager = run()
    return not _difference(eager, compiled, relative).is_finding


def _is_sensitive(
    run: Run,
    eager: Mapping[str, Any],
    compiled: Mapping[str, Any],
    relative: float,
    factor: float,
    where: str,
) -> bool:
    """Whether the value differs as much in plain PyTorch when its operators are off by a few last bits, or by
    ``factor`` of what it differs by then."""
    for shake in (*range(6), None):
        with _Counting(shake, without_remainders=shake is None):
            shaken = run().get(where)
        if isinstance(eager[where], tuple):  # how many values are alike, say
            if shaken != eager[where]:
                return True
            continue
        if not isinstance(shaken, torch.Tensor) or shaken.shape != eager[where].shape:
            return True
        # Values that are rounded or compared jump; others move by as much as they are sensitive.
        if not _equal(eager[where], shaken, relative / 30):
            distance = (compiled[where].double() - eager[where].double()).nan_to_num().abs().max()
            moved = (shaken.double() - eager[where].double()).nan_to_num().abs().max()
            if distance <= factor * moved or not torch.equal(eager[where].isfinite(), shaken.isfinite()):
                return True
    return False


def without_variables(error: Exception) -> Exception:
    """Torch's checkpoint that raises would leave its hooks for saved tensors in place as long as its frames live."""
    chain: list[BaseException] = [error]
    for each in chain:
        traceback.clear_frames(each.__traceback__)
        chain += [cause for cause in (each.__context__, each.__cause__) if cause and cause not in chain]
    return error


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    text = str(value)
    return text if len(text) < 300 else text[:300] + "..."


if __name__ == "__main__":
    torch.set_num_threads(1)
    gradsplit.config.log_level = 40
    for path in sys.argv[1:]:
        with open(path) as file:
            print(path, check(file.read(), path))
