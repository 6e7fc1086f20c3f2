"""Loop nests written by hand, each with the specs of its buffers: what lowering would make of common
operators."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    Constant,
    Gather,
    Load,
    LoopNest,
    Position,
    Reduce,
    Statement,
    Store,
)
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

F32, F64, I64, BOOL = torch.float32, torch.float64, torch.int64, torch.bool
CPU = torch.device("cpu")


@dataclass
class NestBuilder:
    """Writes a nest's body; every method returns the number of the value that it defines."""

    extents: tuple[int, ...]
    reduced_axes: int = 0
    body: list[Statement] = field(default_factory=list)
    buffers: dict[str, TensorSpec] = field(default_factory=dict)

    def add(self, statement: Statement) -> int:
        self.body.append(statement)
        return len(self.body) - 1

    def dtype(self, value: int) -> torch.dtype:
        return self.body[value].dtype  # type: ignore[union-attr]

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = F32) -> None:
        self.buffers[name] = TensorSpec.contiguous(shape, dtype, CPU)

    def access(
        self, name: str, axes: tuple[int | None, ...], gathers: tuple[Gather, ...] = (), offset: int = 0
    ) -> Access:
        """An access of a buffer whose dim ``d`` moves along axis ``axes[d]``."""
        strides = [0] * len(self.extents)
        for axis, stride in zip(axes, self.buffers[name].stride, strict=True):
            if axis is not None:
                strides[axis] += stride
        return Access(name, tuple(strides), offset, gathers)

    def load(self, name: str, axes: tuple[int | None, ...], dtype: torch.dtype | None = None, **more) -> int:
        stored = self.buffers[name].dtype
        widened = F32 if stored in (torch.float16, torch.bfloat16) else stored
        mask, other = more.pop("mask", None), more.pop("other", 0)
        return self.add(Load(self.access(name, axes, **more), dtype or widened, mask, other))

    def store(
        self, name: str, axes: tuple[int | None, ...], value: int, mask: int | None = None, **more
    ) -> int:
        return self.add(Store(self.access(name, axes, **more), value, mask))

    def constant(self, value: float, dtype: torch.dtype = F32) -> int:
        return self.add(Constant(value, dtype))

    def apply(self, operation: str, *arguments: int, dtype: torch.dtype | None = None, parameter=None) -> int:
        comparisons = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf")
        if dtype is None:
            logical = operation in comparisons or operation.startswith("logical")
            dtype = BOOL if logical else self.dtype(arguments[-1])
        return self.add(Apply(operation, arguments, dtype, parameter))

    def reduce(self, operation: str, value: int, dtype: torch.dtype | None = None) -> int:
        return self.add(Reduce(operation, value, dtype or self.dtype(value)))

    def nest(self, name: str) -> LoopNest:
        return LoopNest(name, self.extents, self.reduced_axes, tuple(self.body))


Case = tuple[LoopNest, dict[str, TensorSpec]]


def bias_gelu(rows: int = 5, columns: int = 37, dtype: torch.dtype = F32) -> Case:
    b = NestBuilder((rows, columns))
    b.buffer("x", (rows, columns), dtype)
    b.buffer("bias", (columns,), dtype)
    b.buffer("y", (rows, columns), dtype)
    x = b.apply("add", b.load("x", (0, 1)), b.load("bias", (1,)))
    e = b.apply("erf", b.apply("mul", x, b.constant(0.7071067811865476)))
    half = b.apply("mul", x, b.constant(0.5))
    b.store("y", (0, 1), b.apply("mul", half, b.apply("add", e, b.constant(1.0))))
    return b.nest("bias_gelu"), b.buffers


def residual_add(shape: tuple[int, ...] = (3, 4, 5, 6)) -> Case:
    axes = tuple(range(len(shape)))
    b = NestBuilder(shape)
    for name in ("x", "y", "z"):
        b.buffer(name, shape)
    b.store("z", axes, b.apply("add", b.load("x", axes), b.load("y", axes)))
    return b.nest("residual_add"), b.buffers


def layer_norm(rows: int = 7, columns: int = 65, dtype: torch.dtype = F32) -> Case:
    b = NestBuilder((rows, columns), 1)
    b.buffer("x", (rows, columns), dtype)
    b.buffer("weight", (columns,))
    b.buffer("bias", (columns,))
    b.buffer("y", (rows, columns), dtype)
    b.buffer("mean", (rows,))
    b.buffer("rstd", (rows,))
    x = b.load("x", (0, 1))
    count = b.constant(1.0 / columns)
    mean = b.apply("mul", b.reduce("sum", x), count)
    centred = b.apply("sub", x, mean)
    variance = b.apply("mul", b.reduce("sum", b.apply("mul", centred, centred)), count)
    rstd = b.apply("rsqrt", b.apply("add", variance, b.constant(1e-5)))
    b.store("mean", (0,), mean)
    b.store("rstd", (0,), rstd)
    scaled = b.apply("mul", b.apply("mul", centred, rstd), b.load("weight", (1,)))
    b.store("y", (0, 1), b.apply("add", scaled, b.load("bias", (1,))))
    return b.nest("layer_norm"), b.buffers


def layer_norm_across(parts: int = 2, rows: int = 37, columns: int = 65) -> Case:
    """One whose rows lie contiguous, and are written across."""
    b = NestBuilder((parts, rows, columns), 1)
    b.buffer("x", (parts, rows, columns), torch.bfloat16)
    b.buffer("residual", (parts, rows, columns), torch.bfloat16)
    b.buffer("y", (parts, columns, rows), torch.bfloat16)
    x = b.apply("add", b.load("x", (0, 1, 2)), b.load("residual", (0, 1, 2)))
    count = b.constant(1.0 / columns)
    centred = b.apply("sub", x, b.apply("mul", b.reduce("sum", x), count))
    variance = b.apply("mul", b.reduce("sum", b.apply("mul", centred, centred)), count)
    rstd = b.apply("rsqrt", b.apply("add", variance, b.constant(1e-5)))
    b.store("y", (0, 2, 1), b.apply("mul", centred, rstd))
    return b.nest("layer_norm_across"), b.buffers


def gated_sums_across(parts: int = 5, rows: int = 37, columns: int = 65) -> Case:
    """Sums of rows of a product, one factor of which lies across."""
    b = NestBuilder((rows, parts, columns), 2)
    b.buffer("x", (parts, rows, columns))
    b.buffer("gate", (parts, columns, rows))
    b.buffer("y", (parts, rows, columns), torch.bfloat16)
    b.buffer("sums", (rows,))
    product = b.apply("mul", b.load("x", (1, 0, 2)), b.load("gate", (1, 2, 0)))
    b.store("y", (1, 0, 2), product)
    b.store("sums", (0,), b.reduce("sum", product))
    return b.nest("gated_sums_across"), b.buffers


def layer_norm_backward(rows: int = 7, columns: int = 65) -> Case:
    b = NestBuilder((rows, columns), 1)
    for name in ("x", "dy", "dx"):
        b.buffer(name, (rows, columns))
    b.buffer("weight", (columns,))
    b.buffer("mean", (rows,))
    b.buffer("rstd", (rows,))
    rstd = b.load("rstd", (0,))
    xhat = b.apply("mul", b.apply("sub", b.load("x", (0, 1)), b.load("mean", (0,))), rstd)
    g = b.apply("mul", b.load("dy", (0, 1)), b.load("weight", (1,)))
    count = b.constant(1.0 / columns)
    first = b.apply("mul", b.reduce("sum", g), count)
    second = b.apply("mul", b.reduce("sum", b.apply("mul", g, xhat)), count)
    rest = b.apply("sub", b.apply("sub", g, first), b.apply("mul", xhat, second))
    b.store("dx", (0, 1), b.apply("mul", rest, rstd))
    return b.nest("layer_norm_backward"), b.buffers


def column_sums(rows: int = 33, columns: int = 20, dtype: torch.dtype = F32) -> Case:
    b = NestBuilder((columns, rows), 1)
    b.buffer("x", (rows, columns), dtype)
    b.buffer("y", (columns,), dtype)
    b.store("y", (0,), b.reduce("sum", b.load("x", (1, 0))))
    return b.nest("column_sums"), b.buffers


def norm_weight_gradients(rows: int = 70, columns: int = 40) -> Case:
    """The column sums of a layer norm's backward, which read statistics of rows, too."""
    b = NestBuilder((columns, rows), 1)
    b.buffer("dy", (rows, columns), torch.bfloat16)
    b.buffer("x", (rows, columns))
    for name, size in (("mean", rows), ("rstd", rows), ("dweight", columns), ("dbias", columns)):
        b.buffer(name, (size,))
    dy = b.load("dy", (1, 0))
    centred = b.apply("sub", b.load("x", (1, 0)), b.load("mean", (1,)))
    xhat = b.apply("mul", centred, b.load("rstd", (1,)))
    b.store("dweight", (0,), b.reduce("sum", b.apply("mul", dy, xhat)))
    b.store("dbias", (0,), b.reduce("sum", dy))
    return b.nest("norm_weight_gradients"), b.buffers


def columns_of_parts(parts: int = 3, columns: int = 64, rows: int = 50) -> Case:
    """The first half of a column sum in two: a program's columns lie in one part."""
    b = NestBuilder((parts, columns, rows), 1)
    b.buffer("x", (parts, rows, columns))
    b.buffer("y", (parts, rows, columns), torch.bfloat16)
    b.buffer("scale", (parts,))
    b.buffer("mean", (parts, rows))
    b.buffer("sums", (parts, columns))
    centred = b.apply("sub", b.load("x", (0, 2, 1)), b.load("mean", (0, 2)))
    scaled = b.apply("mul", centred, b.load("scale", (0,)))
    b.store("y", (0, 2, 1), scaled)
    b.store("sums", (0, 1), b.reduce("sum", scaled))
    return b.nest("columns_of_parts"), b.buffers


def transposed_sums(rows: int = 70, columns: int = 40) -> Case:
    """Column sums of a matrix that lies in columns, and is written in rows."""
    b = NestBuilder((columns, rows), 1)
    b.buffer("x", (columns, rows))
    b.buffer("y", (rows, columns), torch.bfloat16)
    b.buffer("sums", (columns,))
    x = b.load("x", (0, 1))
    b.store("y", (1, 0), x)
    b.store("sums", (0,), b.reduce("sum", x))
    return b.nest("transposed_sums"), b.buffers


def total(shape: tuple[int, ...] = (9, 31), operation: str = "sum", dtype: torch.dtype = F32) -> Case:
    axes = tuple(range(len(shape)))
    b = NestBuilder(shape, len(shape))
    b.buffer("x", shape, dtype)
    b.buffer("y", (), dtype)
    b.store("y", (), b.reduce(operation, b.load("x", axes)))
    return b.nest("total"), b.buffers


def softmax(rows: int = 6, columns: int = 50, dim: int = 1) -> Case:
    """Over ``dim``; dim 0 makes the reduced axis strided."""
    extents = (rows, columns) if dim == 1 else (columns, rows)
    axes = (0, 1) if dim == 1 else (1, 0)
    b = NestBuilder(extents, 1)
    b.buffer("x", (rows, columns))
    b.buffer("y", (rows, columns))
    x = b.load("x", axes)
    e = b.apply("exp", b.apply("sub", x, b.reduce("max", x)))
    b.store("y", axes, b.apply("div", e, b.reduce("sum", e)))
    return b.nest(f"softmax_{dim}"), b.buffers


def cross_entropy(rows: int = 9, classes: int = 30) -> Case:
    """Log-softmax and the negative log-likelihood of each row; label -100 is ignored."""
    b = NestBuilder((rows, classes), 1)
    b.buffer("x", (rows, classes))
    b.buffer("target", (rows,), I64)
    b.buffer("loss", (rows,))
    b.buffer("log_sum", (rows,))
    x = b.load("x", (0, 1))
    peak = b.reduce("max", x)
    sums = b.reduce("sum", b.apply("exp", b.apply("sub", x, peak)))
    log_sum = b.apply("add", b.apply("log", sums), peak)
    target = b.load("target", (0,))
    counts = b.apply("ne", target, b.constant(-100, I64))
    chosen = b.load("x", (0, None), mask=counts, gathers=(Gather(target, 1, classes),))
    b.store("loss", (0,), b.apply("where", counts, b.apply("sub", log_sum, chosen), b.constant(0.0)))
    b.store("log_sum", (0,), log_sum)
    return b.nest("cross_entropy"), b.buffers


def embedding(tokens: int = 11, vocabulary: int = 17, width: int = 24) -> Case:
    b = NestBuilder((tokens, width))
    b.buffer("table", (vocabulary, width))
    b.buffer("index", (tokens,), I64)
    b.buffer("y", (tokens, width))
    index = b.load("index", (0,))
    b.store("y", (0, 1), b.load("table", (None, 1), gathers=(Gather(index, width, vocabulary),)))
    return b.nest("embedding"), b.buffers


def gather_elements(rows: int = 6, columns: int = 21) -> Case:
    """Each element picks its own: the index varies over the innermost axis."""
    b = NestBuilder((rows, columns))
    b.buffer("x", (rows, 9))
    b.buffer("index", (rows, columns), I64)
    b.buffer("y", (rows, columns))
    index = b.load("index", (0, 1))
    b.store("y", (0, 1), b.load("x", (0, None), gathers=(Gather(index, 1, 9),)))
    return b.nest("gather_elements"), b.buffers


def rows_added(
    count: int = 11,
    rows: int = 17,
    width: int = 24,
    dtype: torch.dtype = F32,
    reduction: str = "sum",
    is_masked: bool = False,
) -> Case:
    """Rows of a table, each times a number of its own, are combined with rows of another table."""
    b = NestBuilder((count, width))
    b.buffer("table", (rows, width), dtype)
    b.buffer("source", (count,), I64)
    b.buffer("index", (count,), I64)
    b.buffer("weight", (count,), dtype)
    b.buffer("y", (rows, width), F64 if dtype == F64 else F32)
    target = b.load("index", (0,))
    mask = b.apply("ne", target, b.constant(3, I64)) if is_masked else None
    source = Gather(b.load("source", (0,)), width, rows)
    message = b.apply("mul", b.load("table", (None, 1), gathers=(source,)), b.load("weight", (0,)))
    place = b.access("y", (None, 1), gathers=(Gather(target, width, rows),))
    b.add(Store(place, message, mask, reduction))
    return b.nest("rows_added"), b.buffers


def elements_added(rows: int = 6, columns: int = 21, places: int = 9) -> Case:
    """Each row's elements are added to elements of that row: points meet along the innermost axis."""
    b = NestBuilder((rows, columns))
    b.buffer("x", (rows, columns))
    b.buffer("index", (rows, columns), I64)
    b.buffer("y", (rows, places))
    index = b.load("index", (0, 1))
    place = b.access("y", (0, None), gathers=(Gather(index, 1, places),))
    b.add(Store(place, b.load("x", (0, 1)), None, "sum"))
    return b.nest("elements_added"), b.buffers


def counted(count: int = 1000, places: int = 9, dtype: torch.dtype = I64) -> Case:
    """One is added for each point of two axes, of which neither value nor address knows the second."""
    b = NestBuilder((count, 3))
    b.buffer("index", (count,), I64)
    b.buffer("y", (places,), dtype)
    index = b.load("index", (0,))
    place = b.access("y", (None,), gathers=(Gather(index, 1, places),))
    b.add(Store(place, b.constant(1, dtype), None, "sum"))
    return b.nest("counted"), b.buffers


def row_sums_added(count: int = 40, width: int = 33, places: int = 12) -> Case:
    """What rows sum up to, once a row, and their elements are added."""
    b = NestBuilder((count, width), 1)
    b.buffer("x", (count, width))
    b.buffer("index", (count,), I64)
    b.buffer("y", (places,))
    b.buffer("z", (places, width))
    index = b.load("index", (0,))
    x = b.load("x", (0, 1))
    total = b.reduce("sum", x)
    b.add(Store(b.access("y", (None,), gathers=(Gather(index, 1, places),)), total, None, "sum"))
    scaled = b.apply("mul", x, total)
    place = b.access("z", (None, 1), gathers=(Gather(index, width, places),))
    b.add(Store(place, scaled, None, "sum"))
    return b.nest("row_sums_added"), b.buffers


def masked_pad(rows: int = 5, columns: int = 23, pad: int = 3) -> Case:
    b = NestBuilder((rows, columns + 2 * pad))
    b.buffer("x", (rows, columns))
    b.buffer("y", (rows, columns + 2 * pad))
    position = b.add(Position((0, 1)))
    inside = b.apply(
        "logical_and",
        b.apply("ge", position, b.constant(pad, I64)),
        b.apply("lt", position, b.constant(pad + columns, I64)),
    )
    b.store("y", (0, 1), b.load("x", (0, 1), mask=inside, other=-1.5, offset=-pad))
    return b.nest("masked_pad"), b.buffers


def masked_points(count: int = 37) -> Case:
    """A store into one element and a load of one element, each at some points only."""
    b = NestBuilder((count,))
    b.buffer("x", (count,))
    b.buffer("one", ())
    b.buffer("y", (count,))
    b.buffer("chosen", ())
    position = b.add(Position((1,)))
    few = b.apply("lt", position, b.constant(5, I64))
    b.store("y", (0,), b.load("one", (), mask=few, other=3.0))
    b.store("chosen", (), b.load("x", (0,)), mask=b.apply("eq", position, b.constant(30, I64)))
    return b.nest("masked_points"), b.buffers


def positions(count: int = 3, rows: int = 7, columns: int = 16) -> Case:
    """A flat position, along which axes may be merged, and one of a single axis, along which they may not."""
    b = NestBuilder((count, rows, columns))
    for name in ("flat", "row"):
        b.buffer(name, (count, rows, columns), I64)
    b.store("flat", (0, 1, 2), b.add(Position((rows * columns, columns, 1), 5)))
    b.store("row", (0, 1, 2), b.add(Position((0, -2, 0))))
    return b.nest("positions"), b.buffers


def flat_positions(count: int = 3, rows: int = 7, columns: int = 16) -> Case:
    b = NestBuilder((count, rows, columns))
    b.buffer("flat", (count, rows, columns))
    b.store("flat", (0, 1, 2), b.apply("cast", b.add(Position((rows * columns, columns, 1))), dtype=F32))
    return b.nest("flat_positions"), b.buffers


def weighted_columns(rows: int = 40, columns: int = 24) -> Case:
    """Positions in what is reduced and in what follows."""
    b = NestBuilder((columns, rows), 1)
    b.buffer("x", (rows, columns), F64)
    b.buffer("y", (columns,), F64)
    weight = b.apply("cast", b.add(Position((1, columns), 1)), dtype=F64)
    total = b.reduce("sum", b.apply("mul", b.load("x", (1, 0)), weight))
    b.store("y", (0,), b.apply("add", total, b.apply("cast", b.add(Position((3, 0))), dtype=F64)))
    return b.nest("weighted_columns"), b.buffers


def scaled_columns(rows: int = 70, columns: int = 24) -> Case:
    """A factor and a summand for each column, as a batch norm ends with."""
    b = NestBuilder((rows, columns))
    for name in ("scale", "shift"):
        b.buffer(name, (columns,))
    for name in ("x", "y"):
        b.buffer(name, (rows, columns), torch.bfloat16)
    scaled = b.apply("mul", b.load("x", (0, 1)), b.load("scale", (1,)))
    b.store("y", (0, 1), b.apply("add", scaled, b.load("shift", (1,))))
    return b.nest("scaled_columns"), b.buffers


def transpose(rows: int = 45, columns: int = 70) -> Case:
    b = NestBuilder((columns, rows))
    b.buffer("x", (rows, columns))
    b.buffer("y", (columns, rows))
    b.store("y", (0, 1), b.apply("neg", b.load("x", (1, 0))))
    return b.nest("transpose"), b.buffers


def transposed_parts(parts: int = 5, rows: int = 33, columns: int = 49) -> Case:
    """Each of several matrices, as the keys of windows are."""
    b = NestBuilder((parts, rows, columns))
    b.buffer("x", (parts, columns, rows))
    b.buffer("y", (parts, rows, columns))
    b.store("y", (0, 1, 2), b.load("x", (0, 2, 1)))
    return b.nest("transposed_parts"), b.buffers


def turned_pairs(rows: int = 40, pairs: int = 33) -> Case:
    """Neighbours in pairs, by an angle a pair, as rotary positions turn them; stored along rows and across them."""
    b = NestBuilder((rows, pairs, 2))
    b.buffer("angle", (rows, pairs))
    b.buffer("x", (rows, pairs, 2))
    b.buffer("y", (rows, pairs, 2))
    b.buffer("z", (pairs, 2, rows))
    turned = b.apply("mul", b.load("x", (0, 1, 2)), b.load("angle", (0, 1)))
    b.store("y", (0, 1, 2), turned)
    b.store("z", (1, 2, 0), turned)
    return b.nest("turned_pairs"), b.buffers


def arg_extremum(operation: str = "argmax", rows: int = 6, columns: int = 40, dim: int = 1) -> Case:
    extents = (rows, columns) if dim == 1 else (columns, rows)
    b = NestBuilder(extents, 1)
    b.buffer("x", (rows, columns))
    b.buffer("y", (extents[0],), I64)
    b.store("y", (0,), b.reduce(operation, b.load("x", (0, 1) if dim == 1 else (1, 0)), I64))
    return b.nest(f"{operation}_{dim}"), b.buffers


def extrema(rows: int = 6, columns: int = 40, dtype: torch.dtype = F32) -> Case:
    b = NestBuilder((rows, columns), 1)
    b.buffer("x", (rows, columns), dtype)
    x = b.load("x", (0, 1))
    for operation in ("max", "min"):
        b.buffer(operation, (rows,), dtype)
        b.store(operation, (0,), b.reduce(operation, x))
    for operation in ("any", "all"):
        b.buffer(operation, (rows,), BOOL)
        positive = b.apply("gt", x, b.constant(0, b.dtype(x)))
        b.store(operation, (0,), b.reduce(operation, positive))
    return b.nest("extrema"), b.buffers


def casts(count: int = 77, source: torch.dtype = F32, target: torch.dtype = torch.int32) -> Case:
    b = NestBuilder((count,))
    b.buffer("x", (count,), source)
    b.buffer("y", (count,), target)
    b.store("y", (0,), b.load("x", (0,)))
    return b.nest("casts"), b.buffers


def bool_operations(count: int = 70) -> Case:
    b = NestBuilder((count,))
    b.buffer("x", (count,), BOOL)
    b.buffer("y", (count,), BOOL)
    b.buffer("z", (count,), BOOL)
    x, y = b.load("x", (0,)), b.load("y", (0,))
    mixed = b.apply("logical_xor", b.apply("logical_or", x, y), b.apply("bitwise_not", x, dtype=BOOL))
    b.store("z", (0,), b.apply("logical_and", mixed, b.apply("logical_not", b.apply("eq", x, y))))
    return b.nest("bool_operations"), b.buffers


def batch_norm_statistics(images: int = 4, channels: int = 6, pixels: int = 25) -> Case:
    """Parallel axis in the middle, two reduced axes around it, output over everything."""
    b = NestBuilder((channels, images, pixels), 2)
    b.buffer("x", (images, channels, pixels))
    b.buffer("y", (images, channels, pixels))
    b.buffer("mean", (channels,))
    x = b.load("x", (1, 0, 2))
    mean = b.apply("mul", b.reduce("sum", x), b.constant(1.0 / (images * pixels)))
    b.store("mean", (0,), mean)
    b.store("y", (1, 0, 2), b.apply("sub", x, mean))
    return b.nest("batch_norm_statistics"), b.buffers


def channel_variances(channels: int = 6, pixels: int = 100, normalised: bool = True) -> Case:
    """Means, variances and, in another walk, the normalised values of channels-last images."""
    b = NestBuilder((channels, pixels), 1)
    b.buffer("x", (pixels, channels), torch.bfloat16)
    for name in ("mean", "variance"):
        b.buffer(name, (channels,))
    x = b.load("x", (1, 0))
    count = b.constant(float(pixels))
    mean = b.apply("div", b.reduce("sum", x), count)
    centred = b.apply("sub", x, mean)
    variance = b.apply("div", b.reduce("sum", b.apply("mul", centred, centred)), count)
    b.store("mean", (0,), mean)
    b.store("variance", (0,), variance)
    if normalised:
        b.buffer("y", (pixels, channels), torch.bfloat16)
        b.store("y", (1, 0), b.apply("mul", centred, b.apply("rsqrt", variance)))
    return b.nest("channel_variances"), b.buffers


def dropout_like(rows: int = 4, columns: int = 33) -> Case:
    b = NestBuilder((rows, columns))
    b.buffer("x", (rows, columns), torch.bfloat16)
    b.buffer("keep", (rows, columns), BOOL)
    b.buffer("y", (rows, columns), torch.bfloat16)
    scaled = b.apply("mul", b.load("x", (0, 1)), b.constant(1.25))
    rounded = b.apply("round_to", scaled, parameter=torch.bfloat16)
    b.store("y", (0, 1), b.apply("where", b.load("keep", (0, 1)), rounded, b.constant(0.0)))
    return b.nest("dropout_like"), b.buffers


def dropout_from_seed(rows: int = 4, columns: int = 33) -> Case:
    """A number for each element, from its position and a seed; and one for each row."""
    b = NestBuilder((rows, columns), 1)
    for name in ("x", "y", "noise"):
        b.buffer(name, (rows, columns))
    b.buffer("sums", (rows,))
    b.buffer("seeds", (3,), I64)
    seed = b.load("seeds", (None,), offset=2)

    def uniform(position: Position) -> int:
        bits = b.apply("random_word", seed, b.add(position), dtype=torch.int32)
        bits = b.apply("shift_right", bits, b.constant(8, torch.int32))
        bits = b.apply("bitwise_and", bits, b.constant(0xFFFFFF, torch.int32))
        return b.apply("mul", b.apply("cast", bits, dtype=F32), b.constant(2.0**-24))

    noise = uniform(Position((columns, 1)))
    kept = b.apply("cast", b.apply("lt", noise, b.constant(0.75)), dtype=F32)
    dropped = b.apply("mul", b.load("x", (0, 1)), kept)
    b.store("noise", (0, 1), noise)
    b.store("y", (0, 1), dropped)
    b.store("sums", (0,), b.apply("add", b.reduce("sum", dropped), uniform(Position((1, 0), 1 << 40))))
    return b.nest("dropout_from_seed"), b.buffers


def words_and_bias(rows: int = 6, columns: int = 22, offset: int = 6, swapped: bool = False) -> Case:
    """Axes that stay two for the sake of a broadcast, and random words along both."""
    b = NestBuilder((rows, columns))
    b.buffer("bias", (columns,))
    b.buffer("seeds", (2,), I64)
    b.buffer("y", (columns, rows) if swapped else (rows, columns))
    strides = (1, rows) if swapped else (columns, 1)
    word = b.apply(
        "random_word", b.load("seeds", (None,)), b.add(Position(strides, offset)), dtype=torch.int32
    )
    value = b.apply("add", b.apply("cast", word, dtype=F32), b.load("bias", (1,)))
    b.store("y", (1, 0) if swapped else (0, 1), value)
    return b.nest("words_and_bias"), b.buffers


def inputs_for(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """Flat storages with random contents; integers stay small enough to be indices of what they index."""
    _, buffers = case
    generator = torch.Generator().manual_seed(seed)
    storages = {}
    for name, spec in buffers.items():
        size = 1 + sum((s - 1) * t for s, t in zip(spec.shape, spec.stride, strict=True)) if spec.numel else 0
        if spec.dtype == BOOL:
            storages[name] = torch.randint(0, 2, (size,), generator=generator).bool()
        elif spec.dtype.is_floating_point:
            storages[name] = (torch.randn(size, generator=generator) * 2).to(spec.dtype)
        else:
            storages[name] = torch.randint(0, 9, (size,), generator=generator).to(spec.dtype)
    return storages


HAND_WRITTEN = {
    "bias_gelu": bias_gelu(),
    "bias_gelu_bf16": bias_gelu(dtype=torch.bfloat16),
    "bias_gelu_of_odd_rows": bias_gelu(3, 5001, torch.bfloat16),
    "bias_gelu_f16": bias_gelu(dtype=torch.float16),
    "residual_add": residual_add(),
    "layer_norm": layer_norm(),
    "layer_norm_bf16": layer_norm(dtype=torch.bfloat16),
    "layer_norm_long": layer_norm(2, 9000),
    "layer_norm_of_odd_rows": layer_norm(2, 70001),
    "layer_norm_across": layer_norm_across(),
    "layer_norm_across_long": layer_norm_across(1, 9, 3000),
    "gated_sums_across": gated_sums_across(),
    "layer_norm_backward": layer_norm_backward(),
    "column_sums": column_sums(),
    "column_sums_many_rows": column_sums(5000, 70),
    "column_sums_wide": column_sums(40, 1500),
    "column_sums_f64": column_sums(dtype=F64),
    "norm_weight_gradients": norm_weight_gradients(),
    "columns_of_parts": columns_of_parts(),
    "columns_of_parts_many_rows": columns_of_parts(2, 64, 3000),
    "transposed_sums": transposed_sums(),
    "transposed_sums_many_rows": transposed_sums(5000, 70),
    "total": total(),
    "total_large": total((600, 700)),
    "total_max": total((600, 701), "max"),
    "total_int": total((8, 9), "sum", I64),
    "softmax_rows": softmax(),
    "softmax_long": softmax(2, 70000),
    "softmax_of_odd_rows": softmax(2, 70001),
    "softmax_columns": softmax(dim=0),
    "cross_entropy": cross_entropy(),
    "cross_entropy_long": cross_entropy(2, 70001),
    "embedding": embedding(),
    "gather_elements": gather_elements(),
    "rows_added": rows_added(),
    "rows_added_bf16": rows_added(dtype=torch.bfloat16),
    "rows_added_f64": rows_added(3000, 40, 7, F64),
    "rows_added_masked": rows_added(is_masked=True),
    "rows_added_wide": rows_added(9, 9, 5000),
    "rows_added_once": rows_added(1, 17, 24),
    "elements_added": elements_added(),
    "elements_added_many_rows": elements_added(300, 5),
    "elements_added_one_row": elements_added(1, 2000),
    "counted": counted(),
    "counted_f32": counted(dtype=F32),
    "row_sums_added": row_sums_added(),
    "masked_pad": masked_pad(),
    "masked_pad_of_odd_rows": masked_pad(3, 5001, 4),
    "masked_points": masked_points(),
    "positions": positions(),
    "flat_positions": flat_positions(),
    "weighted_columns": weighted_columns(),
    "scaled_columns": scaled_columns(),
    "transpose": transpose(),
    "transpose_three_columns": transpose(3, 1100),
    "transpose_three_rows": transpose(600, 3),
    "transposed_parts": transposed_parts(),
    "transposed_parts_of_whole_blocks": transposed_parts(3, 64, 49),
    "turned_pairs": turned_pairs(),
    "argmax": arg_extremum(),
    "argmin": arg_extremum("argmin"),
    "argmax_columns": arg_extremum(dim=0),
    "extrema": extrema(),
    "extrema_int": extrema(dtype=torch.int32),
    "extrema_f64": extrema(dtype=F64),
    "bool_operations": bool_operations(),
    "batch_norm_statistics": batch_norm_statistics(),
    "dropout_like": dropout_like(),
    "dropout_from_seed": dropout_from_seed(),
    "dropout_from_seed_even": dropout_from_seed(4, 70),
    "dropout_from_seed_long": dropout_from_seed(2, 9000),
    "dropout_from_seed_looped": dropout_from_seed(2, 70000),
    "words_in_pairs": words_and_bias(),
    "words_from_an_odd_position": words_and_bias(offset=7),
    "words_of_odd_rows": words_and_bias(5, 33, 0),
    "words_of_columns": words_and_bias(swapped=True),
    **{
        f"cast_{str(s)[6:]}_{str(t)[6:]}": casts(source=s, target=t)
        for s, t in (
            (F32, torch.int32), (F32, torch.float16), (torch.float16, F32), (F32, torch.bfloat16),
            (torch.bfloat16, F64), (I64, F32), (torch.uint8, F32), (torch.int8, torch.int16), (F32, BOOL),
            (BOOL, I64), (F64, torch.float16), (torch.int16, torch.bfloat16),
        )
    },
}  # fmt: skip
