"""Measured and predicted: what a user is shown of a module's backwards."""
