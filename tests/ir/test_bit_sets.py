"""Sets of small numbers as bits."""

from gradsplit.compile_core.ir.bit_sets import bit_set, is_within, members


def test_members_are_what_a_set_was_made_of() -> None:
    for numbers in ([], [0], [3], [0, 1, 700]):
        assert members(bit_set(reversed(numbers))) == numbers


def test_one_set_within_another() -> None:
    assert is_within(bit_set([1, 70]), bit_set([1, 5, 70]))
    assert not is_within(bit_set([1, 71]), bit_set([1, 5, 70]))
    assert is_within(0, 0)
