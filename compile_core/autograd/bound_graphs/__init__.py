"""Programs bound to autograd's engine, and what is done round them at each call."""
