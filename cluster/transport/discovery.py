"""Finds coordinators by name through Ray, for ingresses and for draining a server.


Ingresses open a link to each, and use actor calls for requests to all.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import ray

NAMESPACE = "aerie"  # Ray namespace of the coordinators' names, apart from Serve's own


def coordinator_prefix(application: str) -> str:
    """Return the name prefix of an application's coordinators; the engine's id follows."""
    return f"coordinator:{application}:"


def find_coordinators(application: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return handles of an application's living coordinators, by engine id; `known` ones are not looked up again."""
    prefix = coordinator_prefix(application)
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(prefix):
            engine_id = name.removeprefix(prefix)
            with contextlib.suppress(ValueError):  # it died between the two calls
                found[engine_id] = known.get(engine_id) or ray.get_actor(name, namespace=NAMESPACE)
    return found
