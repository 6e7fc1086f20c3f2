"""The mode that a capture's fake tensors are made by.

Torch remembers what each operator gave for fake tensors, by a description of all arguments; to make that is most of the
time that an operator takes. Of tensors whose sizes are plain numbers the same can be said in fewer words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from gradsplit.compile_core.torch_facts.private_parts import private

_LONGER = "compilation takes longer"
_torchs_key = private(
    "torch._subclasses.fake_tensor:FakeTensorMode._cache_key",
    "finding what an operator gave for fake tensors before",
    _LONGER,
    lambda *_: None,
)
_Key = private(
    "torch._subclasses.fake_tensor:_DispatchCacheKey",
    "what torch finds that by: a tuple would do",
    "nothing changes",
    tuple,
)
_default_device = private(
    "torch._C:_get_default_device",
    "where fake tensors are made that no argument tells a device for",
    "nothing changes",
    torch.get_default_device,
)

# Told apart by their types and by what they equal.
_PLAIN = frozenset([
    *(int, float, bool, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
])  # fmt: skip


class QuickFakeMode(FakeTensorMode):
    """A mode that makes the description itself where there are no symbols, sparse tensors and the like."""

    def _cache_key(self, state: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.prims.as_strided.default:
            return None  # its schema says that it writes, so that its result is remembered with memory of its own
        # Torch's own begins with the operator.
        key = [
            QuickFakeMode,
            func,
            torch.get_default_dtype(),
            _default_device(),
            torch.is_inference_mode_enabled(),
            None if self.shape_env is None else self.shape_env.settings,
            get_proxy_mode() is None,
            *kwargs,
        ]
        if self._describe(args, key) and self._describe(kwargs.values(), key):
            return _Key(tuple(key))
        return _torchs_key(self, state, func, args, kwargs)

    def _describe(self, values: Iterable[Any], key: list[Any]) -> bool:
        """Adds all that results depend on; False where that is torch's to say."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if (
                    value.fake_mode is not self
                    or value.constant is not None
                    or value._has_symbolic_sizes_strides
                    or value.layout is not torch.strided
                ):
                    return False
                offset, memory = value.storage_offset(), value.untyped_storage().nbytes()
                if type(offset) is not int or type(memory) is not int:
                    return False
                key += (FakeTensor, value.shape, value.stride(), offset, memory)
                key += (value.dtype, value.fake_device, value.requires_grad, value.is_inference())
                key += (value.is_quantized, value.is_conj(), value.is_neg())
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(value, key):
                    return False
            else:
                return False
        return True
