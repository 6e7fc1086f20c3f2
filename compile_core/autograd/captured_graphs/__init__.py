"""A captured graph before its trace: what a run of it on fake tensors shows, its known values, its pieces."""
