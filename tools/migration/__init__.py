"""From the configuration of a TensorRT-LLM engine to the commands that make the same here."""
