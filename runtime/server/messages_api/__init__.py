"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API: a request in its form becomes a
conversation, and the answer becomes blocks and events."""
