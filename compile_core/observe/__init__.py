"""What a compilation shows of itself."""
