"""Calls that take functions: a function becomes a body, a graph of its own that one node of the graph holds."""
