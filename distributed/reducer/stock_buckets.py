"""The buckets of stock DDP's reducer, as parameters.

The reducer rebuilds its buckets once, before its second forward, in the order in which gradients arrived, and from then
on says itself what they are. Until then they are predicted, by torch's own function and limits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.torch_facts.process_groups import FIRST_BUCKET_BYTES, assign_buckets
from gradsplit.distributed.reducer.wrapped_parameters import as_wrapped, looks_for_unused


def are_final(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer's buckets stay as they are."""
    return ddp._has_rebuilt_buckets or looks_for_unused(ddp)


def bucket_limits(ddp: DistributedDataParallel) -> list[int]:
    """Bytes at which the first bucket is full, the second, and so on; the last limit is that of all later ones."""
    # By version of torch.
    limits = getattr(ddp, "bucket_bytes_cap_list", None)
    if limits:
        return list(limits)
    limit = ddp.bucket_bytes_cap
    return [min(limit, FIRST_BUCKET_BYTES) if ddp.bucket_bytes_cap_default else limit, limit]


def stock_buckets(
    ddp: DistributedDataParallel, ready_order: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """What the reducer reduces together, in the order in which it starts.

    Args:
        ready_order: parameters, whether the module's or not, in the order in which their gradients will be final; those
            of the module that are not among them come last.
    """
    if are_final(ddp):
        # Asked once a graph: the reducer makes zeros as large as all gradients for its answer.
        return [list(bucket.parameters()) for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
    with as_wrapped(ddp):
        parameters, are_sparse = ddp._build_params_for_reducer()
    place_of = {parameter: place for place, parameter in enumerate(parameters)}
    ready = [place_of[parameter] for parameter in ready_order if parameter in place_of]
    order = [*ready, *sorted(set(place_of.values()) - set(ready), reverse=True)]
    assigned, _ = assign_buckets(
        [parameters[place] for place in order], bucket_limits(ddp), are_sparse, order
    )
    return [[parameters[place] for place in bucket] for bucket in assigned]
