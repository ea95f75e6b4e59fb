"""Real client libraries, each in its own environment, against a live server of ours.

A developer's tool: nothing of it is imported by the product.
"""
