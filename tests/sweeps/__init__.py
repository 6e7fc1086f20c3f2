"""Sweeps over the models of libraries: what is captured and compiled of each, beside torch.compile. Run by hand."""
