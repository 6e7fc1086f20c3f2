"""Which values a forward keeps for its backward, and which are computed again."""
