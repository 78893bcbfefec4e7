"""Small targets, trained from scratch: `python -m tests.support.targets KIND --data ROWS --output FOLDER`. `llama` made
the embedded pair's target (deploy/models), `deepseek` and `hybrid`, which have a module for multi-token prediction, the
models of tests/models. `clear_routers` changes random ones."""
