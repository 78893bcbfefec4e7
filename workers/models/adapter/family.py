"""The family of every decoder that transformers knows and no other family serves."""

from workers.models.adapter.config import AdapterConfig, read_config, weight_names
from workers.models.adapter.model import TransformersModel
from workers.models.family import ModelFamily

FAMILY: ModelFamily[AdapterConfig] = ModelFamily(read_config, TransformersModel, weight_names)
