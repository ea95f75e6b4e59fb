"""Quantized weights: which formats there are, which weight gets which, and the graphs for them."""
