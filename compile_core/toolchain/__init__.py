"""What turns source text into code that Python calls, shared by capture (guards) and lowering (kernels)."""
