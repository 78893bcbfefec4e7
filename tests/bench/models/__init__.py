"""The models of `tests.bench` that a config.json describes, with dummy weights."""
