"""A captured graph before its trace: what a run of it on fake tensors tells, its known values, its pieces."""
