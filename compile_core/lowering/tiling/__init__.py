"""How a nest is cut for the machine that it runs on, into tiles and, on a GPU, into several nests."""
