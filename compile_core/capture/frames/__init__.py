"""The interpreter: symbolic frames, the binding of arguments, generators, and a handler for each opcode."""
