"""What several tests share: tiny checkpoints, scripted executors, a fake engine; and where the repository's parts are.

clients     a browser, and conversations with a server
drafts      what drafts must be, computed alone
kernels     Triton's interpreter, cases for kernels, devices that are not there
repository  its pages, names, wheel
simulation  scheduler, load, routing and choice of tree shapes, without a model or processes
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MODELS = ROOT / "deploy" / "models"
