"""Names in state_dicts."""

from __future__ import annotations

from tests.multi_process.ddp_harness import case, pair


@case()
def state_dict_has_the_plain_names() -> None:
    stock, compiled = pair()
    assert list(compiled.state_dict()) == list(stock.state_dict())
