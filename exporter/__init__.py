"""Checkpoint -> bundle. torch, transformers and onnx live here and nowhere else."""
