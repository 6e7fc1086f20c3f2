"""Graphs whose sizes are open, for code generation that knows static sizes: programs for the sizes that come."""
