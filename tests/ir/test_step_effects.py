"""What nests read and write, which each remembers."""

from dataclasses import replace

from gradsplit.compile_core.ir.loops import Load, Store
from gradsplit.compile_core.ir.step_effects import reads, writes
from tests.lowering.codegen_nests import bias_gelu


def test_a_changed_nest_remembers_nothing_of_the_first() -> None:
    nest, _ = bias_gelu(4, 8)
    before = reads(nest), writes(nest)
    renamed = tuple(
        replace(s, access=replace(s.access, buffer=f"other_{s.access.buffer}"))
        if isinstance(s, Load | Store)
        else s
        for s in nest.body
    )
    changed = replace(nest, body=renamed)
    after = tuple({f"other_{name}" for name in names} for names in before)
    assert (reads(changed), writes(changed)) == after
    assert (reads(nest), writes(nest)) == before
    assert all(before) and nest == replace(nest) and hash(nest) == hash(replace(nest))
