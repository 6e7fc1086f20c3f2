"""Where gradients lie, and the rounds in which they are reduced."""
