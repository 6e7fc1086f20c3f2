"""Rules for torch: which of its functions are recorded or answered, and what turns its modes and switches."""
