"""Plans for gradient buckets and timelines of them: pure computation, no process group, no GPU."""
