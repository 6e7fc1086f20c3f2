"""From functional ATen graphs to kernels: decompose, lower to loops, fuse, generate code, build."""
