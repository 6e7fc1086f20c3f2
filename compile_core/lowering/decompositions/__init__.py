"""Operators that are taken apart before there are loops."""
