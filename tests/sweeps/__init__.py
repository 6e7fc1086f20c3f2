"""Sweeps over the models of libraries: what is captured of each, beside torch.compile. Not part of the tests."""
