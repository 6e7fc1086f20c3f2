import pytest

from gradsplit.bucketing import Bucket, BucketPlan, Parameter, pack_bucket


def parameter(name, numel, dtype="torch.float32", itemsize=4, device="cpu"):
    return Parameter(name, numel, itemsize, dtype, device)


A, B, C = parameter("a", 3), parameter("b", 16), parameter("c", 17)


def test_pack_aligns_each_start_to_64_bytes():
    bucket = pack_bucket(0, (A, B, C))
    assert bucket.offsets_elements == (0, 16, 32)
    assert bucket.numel == 49
    assert bucket.bytes == 196
    assert bucket.padding_bytes == 13 * 4


def test_pack_keeps_empty_parameters():
    bucket = pack_bucket(0, (parameter("empty", 0), A))
    assert bucket.offsets_elements == (0, 0)
    assert bucket.padding_bytes == 0


@pytest.mark.parametrize(
    ("members", "offsets", "numel", "message"),
    [
        ((), (), 0, "no parameters"),
        ((A, B), (0,), 3, "2 parameters but 1 offsets"),
        ((A, parameter("h", 3, "torch.float16", 2)), (0, 32), 35, "'h' is torch.float16 on cpu"),
        ((A, parameter("d", 3, device="cuda:0")), (0, 16), 19, "'d' is torch.float32 on cuda:0"),
        ((B, A), (0, 0), 3, "'a' overlaps"),
        ((A, B), (0, 3), 19, "'b' is not aligned"),
        ((A, B), (0, 16), 33, "has 33 elements, but ends at 32"),
    ],
)
def test_bucket_refuses_a_wrong_layout(members, offsets, numel, message):
    with pytest.raises(ValueError, match=message):
        Bucket(0, members, offsets, numel)


@pytest.mark.parametrize(
    ("parameters", "groups", "message"),
    [
        ((A, B), ((A,),), "in no bucket: b"),
        ((A, B), ((A, B), (B,)), "'b' is in bucket 0 and again in bucket 1"),
        ((A,), ((A,), (B,)), "bucket 1 holds the unknown parameter 'b'"),
        ((A, A), ((A,),), "'a' is listed twice"),
    ],
)
def test_plan_refuses_what_is_no_partition(parameters, groups, message):
    buckets = tuple(pack_bucket(index, members) for index, members in enumerate(groups))
    with pytest.raises(ValueError, match=message):
        BucketPlan(parameters, buckets)


def test_plan_refuses_wrong_indices():
    with pytest.raises(ValueError, match="bucket 1 stands at position 0"):
        BucketPlan((A,), (pack_bucket(1, (A,)),))


@pytest.mark.parametrize(("numel", "itemsize"), [(-1, 4), (1, 0), (1, 3)])
def test_parameter_refuses_impossible_sizes(numel, itemsize):
    with pytest.raises(ValueError, match="parameter 'x'"):
        parameter("x", numel, itemsize=itemsize)


def test_plan_prints(golden):
    half = parameter("head.weight", 3 << 20, "torch.bfloat16", 2)
    plan = BucketPlan((half, A, B, C), (pack_bucket(0, (half,)), pack_bucket(1, (A, B, C))))
    golden("bucketing/plan.txt", str(plan))
