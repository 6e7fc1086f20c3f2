"""What differs between the CPythons that are supported (3.11 to 3.13), as data.

Opcodes that one version lacks simply never occur there, so a handler for each is enough; here is only what a
handler would otherwise have to ask the version for.
"""

from __future__ import annotations

import sys

VERSION = sys.version_info[:2]
# Of others the bytecode is not known: programs run as plain Python there.
KNOWN_VERSIONS = ((3, 11), (3, 12), (3, 13))

# FOR_ITER at the end of the iteration: 3.11 pops the iterator and jumps. Later versions leave it with a
# placeholder on the stack and jump to END_FOR, which pops this many values (3.13 follows it by a POP_TOP).
END_FOR_POPS = {(3, 11): 0, (3, 12): 2, (3, 13): 1}.get(VERSION, 1)
FOR_ITER_POPS_ITERATOR = VERSION == (3, 11)

# SEND at the end of the inner iterator: 3.11 drops the iterator and jumps, later it is left to END_SEND.
SEND_POPS_ITERATOR = VERSION == (3, 11)

# The low bit of LOAD_ATTR's argument asks for the pair of method and self from 3.12 on.
LOAD_ATTR_HAS_METHOD_BIT = VERSION >= (3, 12)

# PUSH_NULL and the callable: NULL lies below the callable up to 3.12, above it from 3.13 on.
NULL_IS_ABOVE_CALLABLE = VERSION >= (3, 13)

# Look-ups that may push a method and its object, with the number of values that they take. LOAD_ATTR and
# LOAD_SUPER_ATTR do so where the low bit of their argument is set.
METHOD_LOADS = {"LOAD_METHOD": 1} if VERSION == (3, 11) else {"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 3}

# The instructions at the target of FOR_ITER, which it skips when the iteration ends.
END_OF_FOR = {(3, 11): (), (3, 12): ("END_FOR",)}.get(VERSION, ("END_FOR", "POP_TOP"))

# Instructions that are two, and what they are decoded into: they can have the first sixteen variables only.
HALVES = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}

# Conditional jumps have a direction in 3.11 only.
FORWARD_JUMP_OF = {
    f"POP_JUMP_BACKWARD_IF_{what}": f"POP_JUMP_FORWARD_IF_{what}"
    for what in ("TRUE", "FALSE", "NONE", "NOT_NONE")
}

# What takes any value up to 3.12, and from 3.13 on a bool, which TO_BOOL makes or the comparison before it.
TAKES_BOOL = (
    frozenset({"POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "UNARY_NOT"}) if VERSION >= (3, 13) else frozenset()
)

# CALL is preceded by PRECALL with the same argument in 3.11.
CALL_NEEDS_PRECALL = VERSION == (3, 11)

# Names of CALL_INTRINSIC_1's numbers that functions (not modules or type parameters) use.
INTRINSICS_1 = {3: "stopiteration_error", 5: "unary_positive", 6: "list_to_tuple"}

# ... and of CALL_INTRINSIC_2's.
INTRINSICS_2 = {1: "prepare_reraise_star"}

# Loads a local variable that is known to be set.
PLAIN_LOAD_FAST = "LOAD_FAST"

# Instructions that push a cell itself; their argument is a plain name in some versions.
LOADS_OF_CELLS = frozenset({"LOAD_CLOSURE", "LOAD_FAST"})

# What the error of a store to a missing attribute says besides, where the object has no dictionary.
NO_DICTIONARY = " and no __dict__ for setting new attributes" if VERSION >= (3, 13) else ""

# Instructions that have no effect on the state that a symbolic interpreter keeps.
NO_EFFECT = frozenset({"NOP", "RESUME", "CACHE", "PRECALL", "EXTENDED_ARG", "COPY_FREE_VARS"})
