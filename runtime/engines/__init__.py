"""TensorRT plans of a bundle: built once for a kind of GPU, kept beside the ONNX, loaded only when
the record that was written with them fits."""
