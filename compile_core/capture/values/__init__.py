"""Symbolic values: their protocol, and those that every program has: literals, containers, iterators and tensors."""
