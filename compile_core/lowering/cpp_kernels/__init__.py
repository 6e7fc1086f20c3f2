"""A nest as C++, and the compiler that builds it."""
