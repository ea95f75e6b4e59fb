"""The HTTP server: OpenAI-compatible routes over one `AsyncLLM`. The only importers of the web
stack (starlette, uvicorn, pydantic, orjson, prometheus_client) live here."""
