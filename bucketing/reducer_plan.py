"""The buckets that stock DistributedDataParallel would use.

After its first iteration DDP's reducer rebuilds its buckets: it walks the parameters in the order in which
their gradients arrived and fills one open bucket for each (dtype, device). A bucket is closed by the
parameter that brings it to its limit, so it may end well above it; each (dtype, device) goes through the
limits by itself, and stays at the last one. A parameter with sparse gradients is a bucket of its own. What is
still open at the end becomes a bucket too. The source is `Reducer::rebuild_buckets` and
`compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.

Where stock DDP leaves the order to a hash table (the buckets still open at the end, when dtypes or devices
are mixed) we order by the last parameter. Limits count the gradients themselves, not our alignment.
"""

from collections.abc import Collection, Sequence

from gradsplit.bucketing.bucket import BucketPlan, Parameter, pack_bucket

MEBIBYTE = 1024**2
# Those of a user who chooses none.
STOCK_LIMITS_BYTES = (MEBIBYTE, 25 * MEBIBYTE)


def reducer_plan(
    parameters_in_ready_order: Sequence[Parameter],
    limits_bytes: Sequence[int] = STOCK_LIMITS_BYTES,
    sparse: Collection[str] = (),
) -> BucketPlan:
    """The rebuilt reducer's buckets.

    Args:
        parameters_in_ready_order: each parameter once, in the order in which gradients become ready; those that
            are frozen or that DDP has to ignore are not among them.
        limits_bytes: of the first bucket, the second, and so on; the last one also of all later buckets. Of
            `bucket_cap_mb` that one size, of `bucket_cap_mb_list` those sizes. A limit of 0 gives every
            parameter its own bucket.
        sparse: the names of those with sparse gradients.

    Returns:
        Buckets in the order in which the reducer would start their all-reduces.

    Raises:
        ValueError: no limits, negative ones, or two parameters of one name.
    """
    if not limits_bytes or min(limits_bytes) < 0:
        raise ValueError(f"bucket limits are sizes in bytes, at least one: {list(limits_bytes)}")
    closed: list[list[Parameter]] = []
    still_open: dict[tuple[str, str], list[Parameter]] = {}
    open_bytes: dict[tuple[str, str], int] = {}
    filled: dict[tuple[str, str], int] = {}
    for parameter in parameters_in_ready_order:
        if parameter.name in sparse:
            closed.append([parameter])
            continue
        key = (parameter.dtype, parameter.device)
        # Taken out and put back, so that the keys end up in the order of each bucket's last parameter.
        members = still_open.pop(key, [])
        members.append(parameter)
        open_bytes[key] = open_bytes.get(key, 0) + parameter.bytes
        if open_bytes[key] >= limits_bytes[min(filled.get(key, 0), len(limits_bytes) - 1)]:
            closed.append(members)
            open_bytes[key] = 0
            filled[key] = filled.get(key, 0) + 1
        else:
            still_open[key] = members
    groups = [*closed, *still_open.values()]
    buckets = tuple(pack_bucket(index, tuple(members)) for index, members in enumerate(groups))
    return BucketPlan(tuple(parameters_in_ready_order), buckets)
