"""What EAGLE's and EAGLE-3's models are made of: a projection of features, and a decoder layer without the norm that
others have before their attention."""

from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import MLP, Attention
from workers.layers.forward_context import ForwardContext
from workers.layers.linear import check_shape
from workers.layers.linear_method import Product
from workers.layers.norm import RMSNorm
from workers.layers.rotary import Angles
from workers.models.config import ModelConfig


class Projection(Product):
    """y = x W^T (+ b), whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def load(self, part: str, kind: str, full: Tensor) -> None:
        target = self.weight if kind == "weight" else self.bias
        if target is None:
            raise ValueError(f"checkpoint has a bias for {part}, the draft's config says it has none")
        check_shape(f"{part}.{kind}", full, target.shape)
        target.data.copy_(full)


class DraftLayer(nn.Module):
    """A Llama block without a norm before its attention. input_size: what attention reads."""

    def __init__(self, model: ModelConfig, group: TPGroup, input_size: int) -> None:
        super().__init__()
        self.group = group
        self.self_attn = Attention(model, 0, group, input_size)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_eps)
        self.mlp = MLP(model, group)

    def forward(self, x: Tensor, residual: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """[n, hidden] of the rows that attend: residual, what attention makes of x [rows, input_size], and what the MLP
        makes of both. On a GPU `residual` is changed in place."""
        attended = self.self_attn.partial(x, angles, context)
        residual = context.attending_rows(residual)
        normed, residual = self.post_attention_layernorm.add(attended, residual, self.group)
        out: Tensor = residual + self.mlp(normed)
        return out
