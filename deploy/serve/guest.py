"""Applications on a cluster that others use too (`aerie serve --address`): only our own are deployed, watched, drained
and deleted, and Serve is never shut down. Used by `aerie.deploy.serve.launch` and `aerie.deploy.serve.drain`.

Serve's config files are declarative: deploying one deletes every application that an earlier file deployed (Ray 2.60).
So applications are deployed one by one here, as `serve.run` does.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.cluster.config import ConfigError
from aerie.deploy.serve.address import Address
from aerie.deploy.serve.applications import read_applications

_UNSUPPORTED = ("deployments", "runtime_env", "external_scaler_enabled")


@dataclass(frozen=True)
class Guest:
    """Our applications.

    content: the Serve config file's content, with plans as `args` of `aerie.deploy.app:build_planned`.
    replaces: whether applications of the same names may be replaced.
    """

    content: Mapping[str, Any]
    replaces: bool

    @property
    def applications(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.content["applications"]
        return found

    @property
    def names(self) -> list[str]:
        return [_name(application) for application in self.applications]

    def check(self) -> None:
        """Raise ConfigError for applications that would replace others, or that cannot be deployed one by one."""
        running = read_applications()
        for application in self.applications:
            name = _name(application)
            for key in _UNSUPPORTED:
                if application.get(key):
                    raise ConfigError(
                        f"applications: {key} of {name} does not work with --address; use `serve run FILE`, on a "
                        "cluster of your own, or leave it out"
                    )
            if name in running and not self.replaces:
                raise ConfigError(
                    f"application {name} is on this cluster already ({running[name].status}); choose another name "
                    "(--name) and another route_prefix, or replace it (--replace)"
                )

    def address(self, wanted: Address) -> Address:
        """Return where the cluster's Serve listens: `wanted` unless it runs already, with options of its own."""
        from ray.serve.context import _get_global_client

        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            return wanted
        return Address(client.http_config.host or wanted.host, client.http_config.port)

    def serve(self) -> None:
        """Deploy all applications, then wait for a signal. Raises ConfigError if Serve refuses one."""
        from ray import serve
        from ray._common.utils import import_attr
        from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

        options = {"proxy_location": self.content.get("proxy_location"), "http_options": self.content["http_options"]}
        serve.start(**{key: value for key, value in options.items() if value})
        for application in self.applications:
            target = call_user_app_builder_with_args_if_necessary(
                import_attr(application["import_path"]), application.get("args") or {}
            )
            name, prefix = _name(application), application.get("route_prefix", "/")
            try:
                serve.run(target, name=name, route_prefix=prefix, logging_config=self.content.get("logging_config"))
            except Exception as error:  # Serve's own, without a common class
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise ConfigError(
                    f"the cluster refuses application {name} at {prefix}: {reason}; `aerie status` lists what runs"
                ) from None
        threading.Event().wait()

    def leave(self) -> None:
        """Delete our applications; all others stay."""
        from ray import serve

        for name in self.names:
            with contextlib.suppress(Exception):  # the cluster may be gone
                serve.delete(name)


def _name(application: Mapping[str, Any]) -> str:
    """Return an application's name; Serve's own default where the file has none."""
    return str(application.get("name") or "default")
