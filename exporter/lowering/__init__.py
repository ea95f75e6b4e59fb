"""One file per target: what a traced graph becomes for the engine that runs it."""
