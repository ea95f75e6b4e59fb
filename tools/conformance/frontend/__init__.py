"""What Triton's tests of its OpenAI frontend check over HTTP, as tests of ours.

Triton's expectations are kept where our answer differs by design: such a test is on the list.
"""
