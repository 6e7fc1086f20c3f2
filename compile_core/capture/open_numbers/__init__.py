"""Numbers that a capture leaves open: sizes, integers and floats that differ between calls, or that tensors hold."""
