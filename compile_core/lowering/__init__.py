"""From a region's graph to kernels."""
