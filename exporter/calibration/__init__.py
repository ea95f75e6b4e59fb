"""What a text tells about weights, and the quantizers and choices that make use of it."""
