"""What a capture writes down: nodes with their fake tensors, and effects that happen after the graph ran."""
