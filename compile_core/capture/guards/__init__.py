"""Guards: what a capture read of the program's state, and the check before each call that it still holds."""
