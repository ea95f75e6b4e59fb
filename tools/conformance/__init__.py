"""Other projects' server suites, run against `trtllm-lite serve`.

A developer's tool, run from a checkout: `python -m trtllm_lite.tools.conformance --help`. The
suites are fetched from their package archives into a cache folder; nothing of them is in the repo.
What fails is held against `expected/`, where each failure has its reason.
"""
