"""Side-by-side measurements of trtllm-lite and other runtimes, each in its own environment.

A developer's tool, run from a checkout: `python -m trtllm_lite.tools.compare_peers --help`.
Nothing of it is imported by the product.
"""
