"""llama.cpp's quantizer, through its library. Runs in llama.cpp's environment:

python llama_quantize.py F32.gguf OUT.gguf Q8_0
"""

import sys


def quantize(source: str, target: str, kind: str) -> None:
    """Raises RuntimeError when llama.cpp does not succeed."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 2
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if code != 0:
        raise RuntimeError(f"llama.cpp cannot make {target}: {code}")


if __name__ == "__main__":
    quantize(*sys.argv[1:])
