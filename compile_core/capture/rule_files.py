"""The files of rules and of handlers of opcodes: importing this registers them."""

# ruff: noqa: F401

from __future__ import annotations

from gradsplit.compile_core.capture.frames import opcodes_build, opcodes_control, opcodes_data, opcodes_match
from gradsplit.compile_core.capture.higher_order_calls import (
    autograd_functions,
    checkpoints,
    control_flow,
    function_transforms,
    functional_calls,
    gradient_hooks,
)
from gradsplit.compile_core.capture.numpy_arrays import numpy_rules, numpy_wrapper
from gradsplit.compile_core.capture.operations import operator_rules, type_tests
from gradsplit.compile_core.capture.python_rules import (
    attribute_rules,
    builtin_rules,
    copy_rules,
    inspect_rules,
    iteration_rules,
    itertools_rules,
    library_closures,
    message_rules,
    object_rules,
    python_forms,
)
from gradsplit.compile_core.capture.torch_rules import (
    data_conditions,
    function_modes,
    gradient_calls,
    gradients,
    modes,
    module_rules,
    optimizer_rules,
    scalar_rules,
    switches,
    tensor_indices,
    tensor_rules,
)
