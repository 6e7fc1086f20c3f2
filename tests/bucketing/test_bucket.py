import pytest

from bucketing import Bucket, BucketPlan, Parameter, pack_bucket


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


def test_what_is_sent_in_16_bits_comes_first():
    half = Parameter("half", 17, 4, "torch.float32", "cpu", "torch.bfloat16")
    bucket = pack_bucket(0, (A, half, B))
    assert bucket.parameters == (half, A, B)
    assert (bucket.narrow_numel, bucket.sent_dtype) == (32, "torch.bfloat16")
    assert bucket.bytes == 64 * 4
    assert bucket.sent_bytes == 32 * 2 + 32 * 4
    assert pack_bucket(0, (half,)).narrow_numel == 17
    assert pack_bucket(0, (A,)).narrow_numel == 0
    plan = BucketPlan((A, half, B), (bucket,))
    assert "half  [0:+17], sent as torch.bfloat16" in str(plan)


@pytest.mark.parametrize("last", [None, "torch.float16"])
def test_bucket_refuses_mixed_ways_of_sending(last):
    first = None if last is None else "torch.bfloat16"
    members = [
        Parameter("p", 16, 4, "torch.float32", "cpu", first),
        Parameter("q", 16, 4, "torch.float32", "cpu", last or "torch.float16"),
    ]
    with pytest.raises(ValueError, match=r"'q' is sent as torch\.float16, and the one before it as"):
        Bucket(0, tuple(members), (0, 16), 32)


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
