"""One whole graph of a program as data: written to a folder, loaded without the program's source, run and trained."""
