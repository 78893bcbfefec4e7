"""Applications on a cluster that others use too (`aerie serve --address`): only our own are deployed, watched, drained
and deleted, and Serve is never shut down. Used by `aerie.deploy.serve.launch`.

Serve's config files are declarative: deploying one deletes every application that an earlier file deployed (Ray 2.60).
So applications are deployed one by one here, as `serve.run` does. An update whose engine cannot start is undone: Serve
stops the former engine before the next one starts, as the device has no room for both, so the former configuration is
deployed again.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.cluster.config import ConfigError
from aerie.deploy.serve.address import Address
from aerie.deploy.serve.applications import read_applications, record, recorded

_UNSUPPORTED = ("deployments", "runtime_env", "external_scaler_enabled")


@dataclass(frozen=True)
class Guest:
    """Our applications.

    content: the Serve config file's content, with plans as `args` of `aerie.deploy.app:build_planned`.
    replaces: whether applications of the same names may be replaced.
    replaced: those that are, until ours run: name -> what it runs (`record`); None if it does not run, or is unknown.
    """

    content: Mapping[str, Any]
    replaces: bool
    replaced: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    @property
    def applications(self) -> Sequence[Mapping[str, Any]]:
        applications: Sequence[Mapping[str, Any]] = self.content["applications"]
        return applications

    @property
    def names(self) -> list[str]:
        return [_name(application) for application in self.applications]

    @property
    def own(self) -> list[str]:
        """Names of those that replace none, or that run."""
        return [name for name in self.names if name not in self.replaced]

    def check(self) -> None:
        """Note what our applications replace (`replaced`). Raises ConfigError if they may not, or if one cannot be
        deployed alone."""
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
            if name in running:
                self.replaced[name] = recorded(name) if running[name].status == "RUNNING" else None

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

        options = {"proxy_location": self.content.get("proxy_location"), "http_options": self.content["http_options"]}
        serve.start(**{key: value for key, value in options.items() if value})
        for application in self.applications:
            content = {"route_prefix": "/", **application, "logging_config": self.content.get("logging_config")}
            name, prefix = _name(application), content["route_prefix"]
            record(name, content)
            try:
                _deploy(name, content)
            except Exception as error:  # Serve's own, without a common class
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise ConfigError(
                    f"the cluster refuses application {name} at {prefix}: {reason}; `aerie status` lists what runs"
                ) from None
            self.replaced.pop(name, None)
        threading.Event().wait()

    def leave(self, report: Callable[[str], None]) -> None:
        """Delete our applications; all others stay, and those that ours replaced and never ran come back. report:
        called with a line for each of these."""
        from ray import serve

        for name in self.names:
            with contextlib.suppress(Exception):  # the cluster may be gone
                if name not in self.replaced:
                    serve.delete(name)
                    record(name, None)
                    continue
                former = self.replaced[name]
                record(name, former)
                if read_applications()[name].status == "RUNNING":
                    continue  # Serve refused the update at once
                if former is None:
                    report(f"application {name}: what ran before is not known here; deploy it again")
                else:
                    _deploy(name, former, waits=False)
                    report(
                        f"application {name}: its former configuration starts again; `aerie status` tells when it runs"
                    )


def _deploy(name: str, content: Mapping[str, Any], waits: bool = True) -> None:
    """Deploy an entry of a Serve config file. waits: until it runs."""
    from ray import serve
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    target = call_user_app_builder_with_args_if_necessary(
        import_attr(content["import_path"]), content.get("args") or {}
    )
    run = serve.RunTarget(target, name, content["route_prefix"], content["logging_config"])
    serve.run_many([run], wait_for_applications_running=waits)


def _name(application: Mapping[str, Any]) -> str:
    """Return an application's name; Serve's own default where the file has none."""
    return str(application.get("name") or "default")
