"""What a bucket is: some parameters whose gradients share one flat buffer and one all-reduce.

The buffer of a bucket has one dtype and lives on one device. Parameters lie in it in the order in which
their gradients become ready, each start aligned to ``ALIGNMENT_BYTES``, which lets kernels write gradients
with whole vector stores (stock DDP packs densely). The gaps are padding: whoever allocates the buffer fills
it with zeros once, so the padding reduces to zero.
"""

from dataclasses import dataclass

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Parameter:
    """A parameter as planning sees it.

    ``name`` is its qualified name in the module, ``numel`` its number of elements, ``itemsize`` the bytes
    of one element, ``dtype`` and ``device`` any strings that are equal exactly for what may share a buffer
    (`torch.float32`, `cuda:0`).

    Raises ValueError for a negative ``numel`` and for an ``itemsize`` that does not divide
    ``ALIGNMENT_BYTES``.
    """

    name: str
    numel: int
    itemsize: int
    dtype: str
    device: str

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"parameter {self.name!r} has {self.numel} elements")
        if self.itemsize <= 0 or ALIGNMENT_BYTES % self.itemsize:
            raise ValueError(
                f"parameter {self.name!r}: elements of {self.itemsize} bytes do not divide {ALIGNMENT_BYTES}"
            )

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Bucket:
    """Parameters in one flat buffer. Build it with ``pack_bucket``, which chooses the offsets.

    ``offsets_elements[i]`` is where the gradient of ``parameters[i]`` starts; ``numel`` counts the buffer's
    elements, padding included. Raises ValueError when the parameters differ in dtype or device, overlap,
    are unaligned or do not fill the buffer to its end.
    """

    index: int
    parameters: tuple[Parameter, ...]
    offsets_elements: tuple[int, ...]
    numel: int

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError(f"bucket {self.index} has no parameters")
        if len(self.offsets_elements) != len(self.parameters):
            raise ValueError(
                f"bucket {self.index} has {len(self.parameters)} parameters "
                f"but {len(self.offsets_elements)} offsets"
            )
        end_elements = 0
        for parameter, offset_elements in zip(self.parameters, self.offsets_elements, strict=True):
            if (parameter.dtype, parameter.device) != (self.dtype, self.device):
                raise ValueError(
                    f"bucket {self.index} is {self.dtype} on {self.device}, "
                    f"but its parameter {parameter.name!r} is {parameter.dtype} on {parameter.device}"
                )
            if offset_elements < end_elements:
                raise ValueError(
                    f"bucket {self.index}: parameter {parameter.name!r} overlaps the one before it"
                )
            if offset_elements * parameter.itemsize % ALIGNMENT_BYTES:
                raise ValueError(f"bucket {self.index}: parameter {parameter.name!r} is not aligned")
            end_elements = offset_elements + parameter.numel
        if end_elements != self.numel:
            raise ValueError(f"bucket {self.index} has {self.numel} elements, but ends at {end_elements}")

    @property
    def dtype(self) -> str:
        return self.parameters[0].dtype

    @property
    def device(self) -> str:
        return self.parameters[0].device

    @property
    def bytes(self) -> int:
        """The size of the buffer, padding included: what one all-reduce moves."""
        return self.numel * self.parameters[0].itemsize

    @property
    def padding_bytes(self) -> int:
        return self.bytes - sum(parameter.bytes for parameter in self.parameters)


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which their all-reduces start; together they hold each of ``parameters`` once.

    Raises ValueError when a parameter is in no bucket, in two, or unknown, and when bucket indices are not
    0, 1, 2, …. ``str(plan)`` is a readable table.
    """

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        known: dict[str, Parameter] = {}
        for parameter in self.parameters:
            if parameter.name in known:
                raise ValueError(f"the parameter {parameter.name!r} is listed twice")
            known[parameter.name] = parameter
        bucket_of: dict[str, int] = {}
        for position, bucket in enumerate(self.buckets):
            if bucket.index != position:
                raise ValueError(f"bucket {bucket.index} stands at position {position}")
            for parameter in bucket.parameters:
                if known.get(parameter.name) != parameter:
                    raise ValueError(f"bucket {bucket.index} holds the unknown parameter {parameter.name!r}")
                if parameter.name in bucket_of:
                    raise ValueError(
                        f"the parameter {parameter.name!r} is in bucket {bucket_of[parameter.name]} "
                        f"and again in bucket {bucket.index}"
                    )
                bucket_of[parameter.name] = bucket.index
        missing = [name for name in known if name not in bucket_of]
        if missing:
            raise ValueError(f"in no bucket: {', '.join(missing)}")

    @property
    def bytes(self) -> int:
        """The size of all buffers together, padding included."""
        return sum(bucket.bytes for bucket in self.buckets)

    def __str__(self) -> str:
        lines = [
            f"bucket plan: {len(self.parameters)} parameters, {len(self.buckets)} buckets, "
            f"{format_bytes(self.bytes)}"
        ]
        width = max((len(parameter.name) for parameter in self.parameters), default=0)
        for bucket in self.buckets:
            padding = f" with {bucket.padding_bytes} B of padding" if bucket.padding_bytes else ""
            lines.append(
                f"  bucket {bucket.index}: {format_bytes(bucket.bytes)}{padding}, "
                f"{bucket.dtype} on {bucket.device}"
            )
            for parameter, offset_elements in zip(bucket.parameters, bucket.offsets_elements, strict=True):
                lines.append(f"    {parameter.name:<{width}}  [{offset_elements}:+{parameter.numel}]")
        return "\n".join(lines)


def pack_bucket(index: int, parameters: tuple[Parameter, ...]) -> Bucket:
    """The bucket that holds ``parameters`` in this order, each at the next aligned place.

    Raises ValueError when there are none, or when they differ in dtype or device.
    """
    offsets_elements = []
    end_elements = 0
    for parameter in parameters:
        alignment_elements = ALIGNMENT_BYTES // parameter.itemsize
        offset_elements = -(-end_elements // alignment_elements) * alignment_elements
        offsets_elements.append(offset_elements)
        end_elements = offset_elements + parameter.numel
    return Bucket(index, parameters, tuple(offsets_elements), end_elements)


def format_bytes(size_bytes: int) -> str:
    """A size for people: `512 B`, `1.5 KiB`, `25.0 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    if size_bytes < 1024**2:
        return f"{size_bytes / 1024:.1f} KiB"
    return f"{size_bytes / 1024**2:.1f} MiB"
