"""A server under mixed load for a long time: what leaks, drifts or gets lost shows here."""
