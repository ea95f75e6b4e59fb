"""Pytest plugins that stand between a foreign suite and our server.

They run in the suite's own environment, which has pytest and what the suite imports, and nothing of
ours but this checkout at the end of the path.
"""
