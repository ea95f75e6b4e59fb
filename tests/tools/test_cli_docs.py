"""docs/cli.md is what the commands say today."""

from trtllm_lite.tools.cli import COMMANDS
from trtllm_lite.tools.cli_docs import PAGE, page


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "stale: run `make docs`"


def test_the_page_has_every_command() -> None:
    text = page()
    assert all(f"\n## `trtllm-lite {name}`\n" in text for name in COMMANDS)
