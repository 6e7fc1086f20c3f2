import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketing import Parameter, reducer_plan

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


@settings(deadline=None)
@given(tensor_lists(), st.integers(0, 2000), st.integers(0, 4000))
def test_equals_the_reducer_on_random_tensors(tensors, first_cap, cap):
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors, [first_cap, cap], [False] * len(tensors), list(range(len(tensors)))
    )
    ours = indices(reducer_plan(describe(tensors), cap, first_cap))
    # The order of the buckets left open at the end is a hash table's there, so only the closed ones are
    # ordered.
    keys = {(tensor.dtype, tensor.device) for tensor in tensors}
    assert sorted(ours) == sorted(expected)
    ordered = max(len(expected) - len(keys), 0)
    assert ours[:ordered] == expected[:ordered]


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 2000), st.integers(0, 4000))
def test_equals_the_reducer_in_order_for_one_dtype(sizes, first_cap, cap):
    tensors = [torch.empty(numel, device="meta") for numel in sizes]
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [first_cap, cap])
    assert indices(reducer_plan(describe(tensors), cap, first_cap)) == expected


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


def test_negative_limits_are_refused():
    with pytest.raises(ValueError, match="sizes in bytes"):
        reducer_plan([], -1)


@pytest.fixture
def process_group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("bucket_cap_mb", "limits_bytes"), [(None, (25 * 1024**2, 1024**2)), (3, (3 * 1024**2, 3 * 1024**2))]
)
def test_equals_what_ddp_rebuilds(process_group_of_one, bucket_cap_mb, limits_bytes):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    ready = []
    for name, parameter in model.named_parameters():
        described = Parameter(name, parameter.numel(), 4, str(parameter.dtype), str(parameter.device))
        parameter.register_post_accumulate_grad_hook(lambda _, described=described: ready.append(described))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    # Rebuilt at the start of the second iteration, in the first one's order of arrival; logged by the third.
    for _ in range(3):
        ddp(torch.ones(1, 512)).sum().backward()
    plan = reducer_plan(ready[: len(ready) // 3], *limits_bytes)
    rebuilt_sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    sizes = [sum(parameter.bytes for parameter in bucket.parameters) for bucket in plan.buckets]
    assert len(sizes) > 1
    assert rebuilt_sizes == ", ".join(map(str, sizes))
