"""Settings that are refused when they are made."""

from __future__ import annotations

import pytest

from gradsplit.distributed import DDPOptions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agreement_timeout_s": 0.0}, "positive"),
        ({"gradient_compression": "bf16", "copy_engines": True}, "leave out gradient_compression"),
        ({"gradient_compression": "int8"}, "'bf16', 'fp16', not 'int8'"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DDPOptions(**settings)
