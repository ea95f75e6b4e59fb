"""Static files, read once: the playground (`/` and `/static/NAME`) and the API's description
(`/docs` and `/docs/NAME`). Nothing else of the disk is served."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from trtllm_lite.runtime.server.errors import ApiError

FOLDER = Path(__file__).resolve().parent / "static"
DOCS = FOLDER.parent / "docs_page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Pages:
    """The files of one folder by their path: below `prefix`, its page at `index`. They hold no
    secrets, so they need no API key: the page has a field for it. `policy`: directives of the
    content security policy beside those of all pages."""

    def __init__(
        self,
        folder: Path = FOLDER,
        prefix: str = "/static",
        index: str = "/",
        policy: tuple[str, ...] = (),
    ) -> None:
        files = sorted(f for f in folder.glob("*") if f.suffix in _TYPES) if folder.is_dir() else []
        self._files = {f"{prefix}/{f.name}": (f.read_bytes(), _TYPES[f.suffix]) for f in files}
        self._headers = {**_HEADERS, "content-security-policy": "; ".join((_POLICY, *policy))}
        page = self._files.pop(f"{prefix}/{_INDEX}", None)
        if page is not None:
            self._files[index] = page

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
        return Response(body, headers={**self._headers, "content-type": kind})


def all_pages() -> tuple[Pages, ...]:
    """The playground and the API's description, whose styles hold their pictures inside."""
    return Pages(), Pages(DOCS, "/docs", "/docs", ("img-src 'self' data:",))
