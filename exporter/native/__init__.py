"""The second form of a quantized bundle: one graph for both phases, over our own kernels."""
