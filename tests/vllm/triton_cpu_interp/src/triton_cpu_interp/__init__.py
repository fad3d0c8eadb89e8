"""A Triton backend named ``cpu`` for TRITON_INTERPRET=1, where kernels run as NumPy. Tests only."""
