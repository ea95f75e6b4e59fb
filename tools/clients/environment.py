"""One environment a client, made once: exact versions of everything, nothing resolved."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.tools.clients.catalogue import Client

INSTALL_SECONDS = 1800
CLOSED = "http://127.0.0.1:9"
"""A proxy that is none: what leaves this machine fails at once."""
_OURS = ("OPENAI_", "ANTHROPIC_", "TRTLLM_LITE_", "LLM_", "LITELLM_", "HF_")


class InstallError(TrtllmLiteError):
    """A client could not be installed; the text names the log."""


def ensure(client: Client, pins: Mapping[str, str], folder: Path, log: Path) -> Path:
    """The client's environment below `folder`, made if it is not there with these versions.
    Raises InstallError."""
    home = folder / client.name
    stamp = home / ".complete"
    key = hashlib.sha256(json.dumps([sys.version, dict(pins)]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return home
    if home.exists():
        shutil.rmtree(home)
    home.mkdir(parents=True)
    for command in install_commands(client, pins, home):
        _run(command, home, log)
    stamp.write_text(key, encoding="utf-8")
    return home


def install_commands(
    client: Client, pins: Mapping[str, str], home: Path
) -> list[Sequence[str | Path]]:
    """What makes the environment in the empty folder `home`. For Node, writes package.json."""
    if client.language == "node":
        package = {"private": True, "type": "module", "dependencies": dict(pins)}
        (home / "package.json").write_text(json.dumps(package), encoding="utf-8")
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock")
        return [("npm", "install", *options)]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python_of(home))
    exact = [f"{name}=={version}" for name, version in pins.items()]
    commands: list[Sequence[str | Path]] = [(sys.executable, "-m", "venv", "--without-pip", home)]
    if exact:
        commands.append((*pip, "install", "--quiet", "--no-deps", *exact))
    return commands


def python_of(home: Path) -> Path:
    return home / "bin" / "python"


def offline(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """The variables of a client's process: none of the caller's keys and addresses, and proxies
    that lead nowhere, so that what would leave this machine fails where proxies are heeded."""
    kept = {k: v for k, v in environ.items() if not k.startswith(_OURS) and k != "PYTHONPATH"}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        kept[name] = kept[name.lower()] = CLOSED
    kept["NO_PROXY"] = kept["no_proxy"] = "127.0.0.1,localhost"
    caches = {name: str(home / "cache") for name in ("HF_HOME", "XDG_CACHE_HOME")}
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK")
    return {
        **kept,
        **caches,
        **dict.fromkeys(switches, "1"),
        # Without it the table of prices is fetched at import.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _run(command: Sequence[str | Path], home: Path, log: Path) -> None:
    try:
        with log.open("ab") as out:
            subprocess.run(
                command, cwd=home, stdout=out, stderr=out, check=True, timeout=INSTALL_SECONDS
            )
    except FileNotFoundError:
        raise InstallError(f"{command[0]} is not installed here") from None
    except subprocess.SubprocessError as error:
        why = "took too long" if isinstance(error, subprocess.TimeoutExpired) else "failed"
        raise InstallError(f"the installation {why}; see {log}") from None
