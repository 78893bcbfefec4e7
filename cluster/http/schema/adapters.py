"""Bodies of the routes for LoRA adapters."""

from typing import Annotated

from pydantic import Field

from aerie.cluster.http.schema.body import Schema

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
