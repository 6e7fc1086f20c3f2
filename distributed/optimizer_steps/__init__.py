"""An optimizer that steps for some parameters at a time, under the backward."""
