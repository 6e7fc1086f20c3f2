"""Names in state_dicts, and files that were saved through wrappers."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

import gradsplit
from tests.multi_process.ddp_harness import DEVICE, Net, case, check_gradients, data, loss_of, pair, stock_ddp


@case()
def state_dict_has_the_plain_names() -> None:
    stock, compiled = pair()
    assert list(compiled.state_dict()) == list(stock.state_dict())
    inside = DistributedDataParallel(gradsplit.compile(Net().to(DEVICE)))
    assert list(inside.state_dict()) == list(stock.state_dict())
    assert list(inside.module.state_dict()) == list(Net().state_dict())


@case()
def files_with_prefixes_load() -> None:
    stock, compiled = pair(backend="aot_eager")
    trained = Net()
    for model in (stock, compiled):
        loss_of(model(data(0))).backward()
        model.zero_grad()
    stock.module.load_state_dict(trained.state_dict())
    for prefix in ("", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."):
        for parameter in compiled.parameters():
            parameter.data.zero_()
        compiled.load_state_dict({prefix + name: value for name, value in trained.state_dict().items()})
        for model in (stock, compiled):
            model.zero_grad()
            loss_of(model(data(1))).backward()
        check_gradients(stock, compiled, exact=True)
    inside = stock_ddp(lambda: gradsplit.compile(Net(), backend="aot_eager"))
    for prefix in ("module.", "module._orig_mod."):
        inside.load_state_dict({prefix + name: value for name, value in trained.state_dict().items()})
    Net().load_state_dict(compiled.module.state_dict())
    stock.load_state_dict(compiled.state_dict())
    inside.load_state_dict(compiled.state_dict())
