"""What is known of an operator in a joint graph: its kind, its cost, its memory, its marks."""
