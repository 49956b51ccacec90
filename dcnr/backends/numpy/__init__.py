"""Plain NumPy: the living definition of every backend."""
