"""Whether other modules on Python's path hide Aerie's: its five folders have names that a user's project may have too.

Imports nothing of Aerie's, which may be what is hidden.
"""

import importlib.util
from pathlib import Path

FOLDERS = ("attention", "workers", "speculative", "cluster", "deploy")
ROOT = Path(__file__).resolve().parent.parent


def hidden() -> str | None:
    """Return a sentence that names the first module that hides one of Aerie's folders, and the remedy; None if nothing
    hides them."""
    for name in FOLDERS:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # ValueError: a stand-in without __spec__ in sys.modules
            spec = None
        found = spec.origin if spec is not None else None
        if found is None:
            return f"aerie: there is no package `{name}` beside {ROOT / 'aerie'}: install Aerie again"
        if ROOT / name not in Path(found).resolve().parents:
            folder = Path(found).parent if Path(found).name != "__init__.py" else Path(found).parent.parent
            return (
                f"aerie: {found} hides Aerie's own package `{name}` ({ROOT / name}): rename it, or take {folder} off "
                "Python's path (PYTHONPATH, or the folder of the script)"
            )
    return None
