"""The request bodies: which fields there are, of what type and range."""
