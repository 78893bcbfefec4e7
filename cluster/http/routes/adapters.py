"""vLLM's routes that load and unload LoRA adapters in running engines (docs/lora.md), and their bodies. They exist only
for API keys that administer the server."""

import asyncio
import time
from typing import Annotated

from pydantic import Field
from starlette.requests import Request

from aerie.cluster.http.endpoint import Endpoint, post
from aerie.cluster.http.errors import ApiError, invalid, model_not_found, unavailable
from aerie.cluster.http.requests.parameters import adapter_of
from aerie.cluster.http.routes.administration import administer, check_administrator, errors_of
from aerie.cluster.http.schema.body import Schema
from aerie.cluster.http.schema.response import AdapterReply
from aerie.cluster.http.serving import Edge
from aerie.cluster.transport.admin import LoadLora, UnloadLora

AdapterName = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(Schema):
    """lora_name: the model's name for requests. lora_path: the adapter's folder, on the machines of the ranks.
    load_inplace: whether an adapter of this name may be loaded already."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(Schema):
    """lora_name: as it was loaded."""

    lora_name: AdapterName


_KNOWN_LIMIT_S = 2.0  # engines tell this ingress of their adapters within 50 ms


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""

    async def load(http: Request, body: LoadAdapterRequest) -> AdapterReply:
        """Loads a LoRA adapter from a folder that every rank can read, on every engine, beside running requests."""
        name = body.lora_name
        if not adapter_of(name, edge.config):
            raise invalid("lora_name", f"lora_name={name}: is the model's own name; give the adapter another one")
        check_administrator(http)
        if name in edge.engine.adapters() and not body.load_inplace:
            raise _refused(f"adapter {name}: is loaded already; unload it, or set load_inplace")
        outcomes = await administer(edge, http, LoadLora(name, body.lora_path, body.load_inplace))
        present = [outcome for outcome in outcomes if outcome.num_ranks]  # the ingress repeats the call for the others
        if not present:
            raise unavailable(errors_of(outcomes), edge.config.retry_after_s)
        if failed := errors_of(present):
            if not body.load_inplace and any(not outcome.error for outcome in present):
                await edge.engine.administer(UnloadLora(name))  # all engines have the same ones
            raise _refused(failed)
        await _wait_until_known(edge, name, True)
        return AdapterReply(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(http: Request, body: UnloadAdapterRequest) -> AdapterReply:
        """Lets no new request have a LoRA adapter; those that have it go on."""
        name = body.lora_name
        outcomes = await administer(edge, http, UnloadLora(name))
        failed = errors_of(outcomes)
        if failed and all(outcome.error for outcome in outcomes):
            is_enabled = edge.config.serves_adapters
            raise model_not_found(name, edge.config.served_model_name) if is_enabled else _refused(failed)
        await _wait_until_known(edge, name, False)
        return AdapterReply(f"Success: LoRA adapter '{name}' removed successfully.")

    return [
        post("/v1/load_lora_adapter", load, LoadAdapterRequest, AdapterReply),
        post("/v1/unload_lora_adapter", unload, UnloadAdapterRequest, AdapterReply),
    ]


def _refused(message: str) -> ApiError:
    return ApiError(400, message, param="lora_path", code="lora_adapter_refused")


async def _wait_until_known(edge: Edge, name: str, has_it: bool) -> None:
    """Wait until this ingress knows of a change, so that the caller's next request meets it."""
    until_s = time.monotonic() + _KNOWN_LIMIT_S
    while (name in edge.engine.adapters()) != has_it and time.monotonic() < until_s:
        await asyncio.sleep(0.01)
