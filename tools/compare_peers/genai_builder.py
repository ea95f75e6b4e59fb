"""onnxruntime-genai's model builder, for configurations that name a rope for each layer type too.

Runs in the builder's environment, with the builder's own arguments. Builder 0.18 looks for the two
rope bases of Gemma 3 where transformers 4 kept them, and for `rope_parameters["rope_type"]`, of
which transformers 5 has one for each layer type.
"""

import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def patch(model_class: Any) -> None:
    """Hand the rope over in the form that the builder reads. Other ropes than the default one are
    left to the builder, which refuses them."""
    original = model_class.__init__

    def __init__(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        parameters = getattr(config, "rope_parameters", None) or {}
        full, local = (parameters.get(f"{k}_attention") for k in ("full", "sliding"))
        if full and local and full["rope_type"] == local["rope_type"] == "default":
            config.rope_theta = full["rope_theta"]
            config.rope_local_base_freq = local["rope_theta"]
            config.rope_parameters = full
        original(self, config, *arguments, **options)

    model_class.__init__ = __init__


def main() -> None:
    """The builder is run as a script, which finds its parts as top-level modules."""
    spec = find_spec("onnxruntime_genai.models")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    sys.path[:0] = folders
    patch(import_module("builders.base").Model)
    runpy.run_path(f"{folders[0]}/builder.py", run_name="__main__")


if __name__ == "__main__":
    main()
