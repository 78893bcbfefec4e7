"""Small targets with a module for multi-token prediction, trained from scratch: `python -m tests.support.targets
deepseek --size tiny --data ROWS --output FOLDER` made `tests/models/deepseek_tiny`, the kind `hybrid` made
`tests/models/hybrid_tiny`.
"""
