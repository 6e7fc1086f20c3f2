"""Where a backward is cut, in which order it runs, and which gradients share a bucket."""
