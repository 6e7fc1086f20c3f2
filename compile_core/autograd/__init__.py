"""From a captured graph to a forward and a backward program."""
