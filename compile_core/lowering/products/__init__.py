"""Matrix products: which library or generated kernel is the fastest."""
