"""What the process imports that forks the ranks of tests (`tests.support.ranks`)."""

import pytest  # noqa: F401

import aerie.speculative.build  # noqa: F401
import aerie.workers.runner.local_engine  # noqa: F401
import tests.support.ranks  # noqa: F401
from tests.support.structured_output import quick_templates

quick_templates.install()
