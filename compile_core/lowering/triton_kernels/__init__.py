"""A nest as Triton, and the processes that compile it."""
