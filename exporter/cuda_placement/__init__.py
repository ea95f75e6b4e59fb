"""Where ONNX Runtime's CUDA provider puts the nodes of a graph, found without a GPU."""

from trtllm_lite.exporter.cuda_placement.check import check_cuda_graph, check_cuda_model

__all__ = ["check_cuda_graph", "check_cuda_model"]
