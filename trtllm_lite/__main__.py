"""`python -m trtllm_lite` is the command line."""

from trtllm_lite.tools.cli import main

main()
