"""Bundle -> tokens. No torch, transformers or onnx, ever."""
