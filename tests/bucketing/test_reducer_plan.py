import inspect

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from gradsplit.bucketing import Parameter, reducer_plan
from gradsplit.distributed.reducer.stock_buckets import bucket_limits

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def describe(tensors):
    return [
        Parameter(str(index), tensor.numel(), tensor.element_size(), str(tensor.dtype), str(tensor.device))
        for index, tensor in enumerate(tensors)
    ]


def indices(plan):
    return [[int(parameter.name) for parameter in bucket.parameters] for bucket in plan.buckets]


@st.composite
def tensor_lists(draw):
    sizes = st.tuples(st.integers(0, 300), st.sampled_from(DTYPES))
    # Tensors of the meta device have sizes and no memory, and show that devices are kept apart.
    return [
        torch.empty(numel, dtype=dtype, device=device)
        for (numel, dtype), device in draw(
            st.lists(st.tuples(sizes, st.sampled_from(["cpu", "cpu", "meta"])), min_size=1, max_size=40)
        )
    ]


limits = st.lists(st.integers(0, 4000), min_size=1, max_size=4)


@settings(deadline=None)
@given(tensor_lists(), limits, st.data())
def test_equals_the_reducer_on_random_tensors(tensors, limits_bytes, data):
    are_sparse = data.draw(st.lists(st.booleans(), min_size=len(tensors), max_size=len(tensors)))
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors, limits_bytes, are_sparse, list(range(len(tensors)))
    )
    sparse = {str(index) for index, is_sparse in enumerate(are_sparse) if is_sparse}
    ours = indices(reducer_plan(describe(tensors), limits_bytes, sparse))
    # The order of the buckets left open at the end is a hash table's there, so only the closed ones are
    # ordered.
    keys = {(tensor.dtype, tensor.device) for tensor in tensors}
    assert sorted(ours) == sorted(expected)
    ordered = max(len(expected) - len(keys), 0)
    assert ours[:ordered] == expected[:ordered]


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), limits)
def test_equals_the_reducer_in_order_for_one_dtype(sizes, limits_bytes):
    tensors = [torch.empty(numel, device="meta") for numel in sizes]
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits_bytes)
    assert indices(reducer_plan(describe(tensors), limits_bytes)) == expected


def test_default_limits_on_a_known_model():
    # Of 4 MiB each, the first exceeds 1 MiB alone, and it takes seven more to exceed 25 MiB.
    parameters = describe([torch.empty(1 << 20, device="meta") for _ in range(10)])
    assert indices(reducer_plan(parameters)) == [[0], [1, 2, 3, 4, 5, 6, 7], [8, 9]]


def test_open_buckets_come_last_in_the_order_of_their_last_parameter():
    floats = {name: Parameter(name, 1, 4, "float32", "cpu") for name in ("0", "3")}
    halves = {name: Parameter(name, 1, 2, "float16", "cpu") for name in ("1", "2")}
    order = [floats["0"], halves["1"], halves["2"], floats["3"]]
    assert indices(reducer_plan(order)) == [[1, 2], [0, 3]]


def test_no_parameters_need_no_bucket():
    assert reducer_plan([]).buckets == ()


@pytest.mark.parametrize("limits_bytes", [[-1], [1, -1], []])
def test_limits_that_are_none_are_refused(limits_bytes):
    with pytest.raises(ValueError, match="sizes in bytes"):
        reducer_plan([], limits_bytes)


@pytest.fixture
def process_group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Mixed(torch.nn.Module):
    """Layers of two dtypes, a tied weight, a frozen parameter and one that DDP is told to ignore."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))
        self.doubles = torch.nn.ModuleList(torch.nn.Linear(64, 64, dtype=torch.float64) for _ in range(3))
        self.layers[5].weight = self.layers[1].weight
        self.layers[2].bias.requires_grad_(False)
        self._ddp_params_and_buffers_to_ignore = ["layers.3.weight"]

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k % 2:
                x = self.doubles[k // 2](x.double()).float()
        return x


@pytest.mark.parametrize("limits_mb", [None, 0.03, [0.01, 0.05, 0.02]])
def test_equals_what_ddp_rebuilds(process_group_of_one, limits_mb):
    model = Mixed()
    options = {"bucket_cap_mb_list" if isinstance(limits_mb, list) else "bucket_cap_mb": limits_mb}
    supported = inspect.signature(DistributedDataParallel).parameters
    if not options.keys() <= supported.keys():
        pytest.skip("this torch has no limits for each bucket")
    ready = []
    for name, parameter in model.named_parameters():
        described = Parameter(
            name, parameter.numel(), parameter.element_size(), str(parameter.dtype), str(parameter.device)
        )
        if parameter.requires_grad and name != "layers.3.weight":
            parameter.register_post_accumulate_grad_hook(
                lambda _, described=described: ready.append(described)
            )
    ddp = DistributedDataParallel(model, **options)
    # Rebuilt at the start of the second iteration, in the first one's order of arrival.
    for _ in range(2):
        ddp(torch.ones(1, 64)).sum().backward()
    names = {parameter: name for name, parameter in model.named_parameters()}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    rebuilt = [[names[parameter] for parameter in bucket.parameters()] for bucket in buckets]
    plan = reducer_plan(ready[: len(ready) // 2], bucket_limits(ddp))
    assert sorted([parameter.name for parameter in bucket.parameters] for bucket in plan.buckets) == sorted(
        rebuilt
    )
    assert len(rebuilt) >= (2 if limits_mb is None else 4)
