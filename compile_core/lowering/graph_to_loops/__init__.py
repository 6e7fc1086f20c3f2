"""A region's graph becomes loop nests and calls of torch's kernels."""
