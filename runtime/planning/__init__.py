"""What a model will need and how fast it can be at most, worked out and not run."""
