"""Stage 0: a call of compiled code finds the entry whose guards hold, or has one made."""
