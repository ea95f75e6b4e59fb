"""What `trtllm-lite doctor` looks at: the machine, and with --gpu what a GPU computes."""
