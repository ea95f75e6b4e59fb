"""One file for each runtime that is measured; the seam is `adapters/base.py`."""
