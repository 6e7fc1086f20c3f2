"""What is seen of who holds a tensor."""

from __future__ import annotations

import torch

from gradsplit.compile_core.torch_facts.holders import is_held_once


def test_a_tensor_that_nothing_else_holds() -> None:
    assert is_held_once(torch.ones(3))


def test_views_and_saved_tensors_hold_memory() -> None:
    base = torch.ones(3, 3)
    view = base[1]
    assert not is_held_once(base) and not is_held_once(view)
    del view
    assert is_held_once(base)
    weight = torch.ones(3, requires_grad=True)
    value = weight * 2
    kept = value.exp()  # which is saved
    assert not is_held_once(kept)
    storage = base.untyped_storage()
    other = torch.empty(0).set_(storage)
    assert not is_held_once(base)
    del other, storage
    assert is_held_once(base)


def test_memory_behind_a_tensor_is_counted_from_its_first_element() -> None:
    part = torch.empty(0).set_(torch.ones(32).untyped_storage(), 2, (4, 5), (8, 1))
    assert is_held_once(part, 30) and not is_held_once(part, 31)
