"""Graphs in half precision as ones that a CPU computes: in float32, with every value rounded."""
