"""The buckets that stock DistributedDataParallel would use.

After its first iteration DDP's reducer rebuilds its buckets: it walks the parameters in the order in which
their gradients arrived and fills one open bucket for each (dtype, device). A bucket is closed by the
parameter that brings it to its limit, so it may end well above it; the first bucket of each (dtype, device)
has the first limit and all later ones the second. What is still open at the end becomes a bucket too. The
source is `Reducer::rebuild_buckets` and `compute_bucket_assignment_by_size` in
torch/csrc/distributed/c10d/reducer.cpp.

Where stock DDP leaves the order to a hash table (the buckets still open at the end, when dtypes or devices
are mixed) we order by the last parameter. Not modelled: parameters with sparse gradients, each of which DDP
reduces alone, and the per-bucket limits of `bucket_cap_mb_list`. Limits count the gradients themselves, not
our alignment.
"""

from collections.abc import Sequence

from bucketing.bucket import BucketPlan, Parameter, pack_bucket

MEBIBYTE = 1024**2


def reducer_plan(
    parameters_in_ready_order: Sequence[Parameter],
    bucket_bytes_cap: int = 25 * MEBIBYTE,
    first_bucket_bytes_cap: int = MEBIBYTE,
) -> BucketPlan:
    """The rebuilt reducer's buckets for parameters given in the order in which their gradients become ready.

    DDP uses ``first_bucket_bytes_cap`` only when its user left ``bucket_cap_mb`` alone; for a chosen size
    pass that size as both. The plan's buckets are in the order in which the reducer would start their
    all-reduces. A limit of 0 gives every parameter its own bucket.

    Raises ValueError for negative limits or for two parameters of one name.
    """
    if bucket_bytes_cap < 0 or first_bucket_bytes_cap < 0:
        raise ValueError(f"bucket limits are sizes in bytes: {first_bucket_bytes_cap}, {bucket_bytes_cap}")
    closed: list[list[Parameter]] = []
    still_open: dict[tuple[str, str], list[Parameter]] = {}
    open_bytes: dict[tuple[str, str], int] = {}
    limits_bytes: dict[tuple[str, str], int] = {}
    for parameter in parameters_in_ready_order:
        key = (parameter.dtype, parameter.device)
        # Taken out and put back, so that the keys end up in the order of each bucket's last parameter.
        members = still_open.pop(key, [])
        members.append(parameter)
        open_bytes[key] = open_bytes.get(key, 0) + parameter.bytes
        if open_bytes[key] >= limits_bytes.get(key, first_bucket_bytes_cap):
            closed.append(members)
            open_bytes[key] = 0
            limits_bytes[key] = bucket_bytes_cap
        else:
            still_open[key] = members
    groups = [*closed, *still_open.values()]
    buckets = tuple(pack_bucket(index, tuple(members)) for index, members in enumerate(groups))
    return BucketPlan(tuple(parameters_in_ready_order), buckets)
