"""CPython's code objects: decoded, and written anew so that code is entered in its middle."""
