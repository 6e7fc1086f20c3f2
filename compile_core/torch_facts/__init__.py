"""Facts about torch that are not in its public interface, an area a file."""
