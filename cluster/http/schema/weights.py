"""Bodies of the routes for weights."""

from typing import Annotated

from pydantic import Field

from aerie.cluster.http.schema.body import Schema

Path = Annotated[str, Field(min_length=1, max_length=4096)]


class UpdateInfo(Schema):
    """path, draft_path: folders of the target's and the draft's weights, on the machines of the ranks."""

    path: Path | None = None
    draft_path: Path | None = None


class UpdateWeightsRequest(Schema):
    """What to load."""

    update_info: UpdateInfo
