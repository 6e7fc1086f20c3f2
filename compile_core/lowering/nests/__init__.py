"""One nest as such: its body, its axes, what it computes where."""
