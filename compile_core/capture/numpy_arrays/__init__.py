"""NumPy: an array is a tensor of the graph, and what NumPy would do with it is a node."""
