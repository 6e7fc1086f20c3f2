"""Random programs, forward and backward, compiled and in plain PyTorch: see ``__main__`` for how to run them."""
