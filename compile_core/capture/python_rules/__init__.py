"""Rules for calls of Python's built-in functions and of its standard library."""
