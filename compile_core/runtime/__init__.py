"""Runs compiled programs."""
