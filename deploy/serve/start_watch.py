"""Ends a start of `aerie serve` that cannot succeed. Used by `deploy.serve.drain`."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from deploy.serve.watches import Watch


class StartWatch(Watch):
    """Ends this process with SIGTERM if an engine's start is refused or Serve gives up the application, until the
    application runs. Otherwise Serve (2.60) would try again, and `serve run` would never end.

    reason: why the start cannot succeed; "" if it may."""

    period_s = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def stop(self) -> None:
        """Stop watching. Does not wait for Serve, which may hang."""
        self._stopped.set()

    def look(self) -> None:
        from ray import serve

        applications = serve.status().applications
        self.reason = failure(applications)
        if self.reason:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.reason or (applications and all(app.status == "RUNNING" for app in applications.values())):
            self._stopped.set()


def failure(applications: Mapping[str, Any]) -> str:
    """Return the reason that an application of `serve.status()` cannot start; "" if all can."""
    from cluster.replica.refusals import remembered

    for name, application in applications.items():
        if reason := remembered(name):
            return f"the engine could not start: {reason}"
        if application.status == "DEPLOY_FAILED":
            last = application.message.strip().splitlines()
            return f"Serve gave up application {name}: {last[-1] if last else 'it does not say why'}"
    return ""
