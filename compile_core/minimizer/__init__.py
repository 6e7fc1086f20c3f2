"""A failing graph made as small as it still fails in the same way, and written as a program of its own."""
