"""Guards: what a capture read of the program's state."""
