"""The playground's files, read once: `/` and `/static/NAME`. Nothing else of the disk is served."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from trtllm_lite.runtime.server.errors import ApiError

FOLDER = Path(__file__).resolve().parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Pages:
    """Static files by their path. They hold no secrets, so they need no API key: the page has a
    field for it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = sorted(f for f in folder.glob("*") if f.suffix in _TYPES) if folder.is_dir() else []
        self._files = {f"/static/{f.name}": (f.read_bytes(), _TYPES[f.suffix]) for f in files}
        index = self._files.pop(f"/static/{_INDEX}", None)
        if index is not None:
            self._files["/"] = index

    @property
    def paths(self) -> frozenset[str]:
        """All paths that are served."""
        return frozenset(self._files)

    def routes(self) -> list[BaseRoute]:
        """One for each file."""
        return [Route(path, self._serve, methods=["GET"]) for path in sorted(self._files)]

    async def _serve(self, request: Request) -> Response:
        found = self._files.get(request.scope["path"])
        if found is None:
            raise ApiError(404, "there is no such page", code="not_found")
        body, kind = found
        return Response(body, headers={**_HEADERS, "content-type": kind})
