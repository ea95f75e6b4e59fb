"""One file per target: what a traced graph becomes for the engine that runs it."""

from importlib import import_module

from trtllm_lite.exporter.lowering.base import Target

__all__ = ["Target", "find_target"]


def find_target(name: str, attention: str = "lengths") -> Target:
    """The target of that name; its module is imported on first use. attention: see
    `ExportOptions`."""
    module = import_module(f"trtllm_lite.exporter.lowering.{name}")
    target: Target = module.TARGET if attention == "lengths" else module.MASKED
    return target
