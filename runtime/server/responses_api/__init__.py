"""POST /v1/responses, OpenAI's newer API, without anything stored: a request in its form becomes a
conversation, and the answer becomes items and events."""
