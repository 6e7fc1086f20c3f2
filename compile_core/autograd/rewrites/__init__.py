"""Passes from graph to graph, which change how values are computed and laid out."""
