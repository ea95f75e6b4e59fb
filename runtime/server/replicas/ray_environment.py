"""What Ray is told through the environment, since there is no argument for it."""

import os
import secrets


def prepare() -> None:
    """To be called before Ray is imported, in a program that uses it for replicas only."""
    os.environ.update(
        {
            # Nobody is told that Ray runs here.
            "RAY_USAGE_STATS_ENABLED": "0",
            # Every socket on the loopback interface. Despite its name it counts on Linux too.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # Other users of this machine reach loopback: they lack the token.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    )
