"""Stock DDP's reducer: its buckets, graphs that are cut for it, and how it is released."""
