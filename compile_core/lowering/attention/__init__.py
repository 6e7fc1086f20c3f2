"""Attention with changed scores: which calls become generated kernels, and how these are cut."""
