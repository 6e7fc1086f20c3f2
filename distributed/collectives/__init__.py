"""What ranks send one another: buckets to average, a module's buffers, and what it takes."""
