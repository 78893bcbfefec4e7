"""The family of every decoder of transformers that has no family of its own."""

from workers.models.adapter.config import AdapterConfig, read_config, weight_names
from workers.models.adapter.model import TransformersModel
from workers.models.registry import ModelFamily

FAMILY: ModelFamily[AdapterConfig] = ModelFamily(read_config, TransformersModel, weight_names)
