"""How ranks agree, in the process group's store, on what they compile, and learn of one that failed."""
