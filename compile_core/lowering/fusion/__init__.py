"""Fewer kernels that move fewer bytes: nests of a program as one, side by side, or in place."""
