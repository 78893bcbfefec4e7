"""Generates a target's own answers to prompts; drafts are trained and measured on them.

`generate_answers` decodes Llama, Qwen2 and Qwen3 with transformers' modules and a loop of its own, which keeps keys and
values in place; `generate` copies them in every step. Other models use `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from aerie.speculative.training.samples import Sample

_GROUPED = ("llama", "qwen2", "qwen3")
_MAX_SCORES = 1 << 28  # elements of attention scores; bounds the memory of long prompts
_CHECK_EVERY = 16  # steps between checks for finished answers; a check waits for the device


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    progress: bool = True,
) -> list[Sample]:
    """Return the model's answer to each prompt, in order, including the end-of-turn token if it was reached.

    `temperature` 0 is greedy. Seeds the global RNG: `generate` takes no generator (transformers 5.17).
    """
    torch.manual_seed(seed)
    stops = stop_tokens(model, tokenizer)
    pad = stops[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)

    def decode(tokens: Tensor, padding: Tensor, on_share: Callable[[float], None]) -> Tensor:
        """Generate [B, max_new_tokens] int64 from left-padded tokens [B, P] and padding [B]. Tokens after a stop token
        are arbitrary. on_share: called with the share of the longest answers that is done."""
        if _is_grouped(model):
            return _decode_grouped(model, tokens, padding, stops, temperature, max_new_tokens, on_share)
        return _decode_by_generate(model, tokens, padding, stops, pad, temperature, max_new_tokens)

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Sample] = {}
    title = f"regenerate at {temperature:g}"
    with tqdm(total=len(prompts), desc=title, disable=not progress, mininterval=2.0) as bar:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            padding = [len(prompts[chosen[-1]]) - len(prompts[i]) for i in chosen]
            rows = [[pad] * extra + [*prompts[i]] for i, extra in zip(chosen, padding, strict=True)]
            inputs = torch.tensor(rows, device=model.device), torch.tensor(padding, device=model.device)

            def advance(share: float, start: int = start, count: int = len(chosen)) -> None:
                bar.update(start + int(share * count) - bar.n)

            decoded = decode(*inputs, advance)
            for index, answer in zip(chosen, decoded.tolist(), strict=True):
                answers[index] = Sample((*prompts[index], *until_stop(answer, stops)), len(prompts[index]))
            advance(1.0)
    return [answers[i] for i in range(len(prompts))]


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: the generation config's, else the tokenizer's end of turn."""
    stops = model.generation_config.eos_token_id
    stops = tokenizer.eos_token_id if stops is None else stops
    return [stops] if isinstance(stops, int) else list(stops)


def until_stop(tokens: Sequence[int], stops: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first stop token, or all."""
    end = next((index for index, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[: end + 1])


def _decode_by_generate(
    model: PreTrainedModel,
    tokens: Tensor,
    padding: Tensor,
    stops: list[int],
    pad: int,
    temperature: float,
    max_new_tokens: int,
) -> Tensor:
    """Return answers [B, new tokens] by transformers' `generate`, padded with `pad`.

    tokens: [B, length] int64, padded on the left.
    padding: [B] int64 number of padding tokens of each row.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    output: Tensor = model.generate(
        input_ids=tokens,
        attention_mask=(torch.arange(tokens.shape[1], device=tokens.device) >= padding.unsqueeze(1)).long(),
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=pad,
        **sampling,
    )
    return output[:, tokens.shape[1] :]


def _is_grouped(model: PreTrainedModel) -> bool:
    kinds = set(getattr(model.config, "layer_types", None) or ())
    return model.config.model_type in _GROUPED and kinds <= {"full_attention"}


def _decode_grouped(
    model: PreTrainedModel,
    tokens: Tensor,
    padding: Tensor,
    stops: list[int],
    temperature: float,
    max_new_tokens: int,
    on_share: Callable[[float], None],
) -> Tensor:
    """Return answers [B, max_new_tokens] int64, filled with a stop token after their end.

    Every `_CHECK_EVERY` steps, finished rows are dropped if they are more than a fifth, because the time of a step
    grows with its rows.

    tokens: [B, length] int64, padded on the left.
    padding: [B] int64 number of padding tokens of each row.
    on_share: called with the share of the steps that are done.
    """
    count, device = tokens.shape[0], tokens.device
    decoder = _GroupedDecoder(model, padding, tokens.shape[1] + max_new_tokens)
    ends = torch.tensor(stops, device=device)
    answers = torch.full((count, max_new_tokens), stops[0], device=device)
    rows, finished = torch.arange(count, device=device), torch.zeros(count, dtype=torch.bool, device=device)
    logits = decoder.prefill(tokens)
    for step in range(max_new_tokens):
        if temperature > 0:
            chosen = torch.multinomial(torch.softmax(logits.float() / temperature, dim=-1), 1)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        answers[rows, step] = chosen[:, 0]
        finished = finished | torch.isin(chosen[:, 0], ends)
        if step % _CHECK_EVERY == _CHECK_EVERY - 1:
            unfinished = (~finished).nonzero()[:, 0]
            if not len(unfinished):
                break
            if len(unfinished) < 0.8 * len(rows):
                decoder.select(unfinished)
                rows, finished, chosen = rows[unfinished], finished[unfinished], chosen[unfinished]
            on_share((step + 1) / max_new_tokens)
        logits = decoder.step(chosen)
    return answers


class _GroupedDecoder:
    """Decodes a batch of left-padded prompts with keys and values in place, shared by the query heads of a group.

    padding: [B] int64, number of padding tokens before each prompt.
    capacity: maximum number of tokens, including padding.
    """

    def __init__(self, model: PreTrainedModel, padding: Tensor, capacity: int) -> None:
        config = model.config
        self.model, self.padding, self.length = model, padding, 0
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        shape = (2, config.num_hidden_layers, len(padding), self.num_kv_heads, capacity, self.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=model.dtype, device=model.device)

    def select(self, rows: Tensor) -> None:
        """Drop all other rows of the batch."""
        self.padding, self.keys, self.values = self.padding[rows], self.keys[:, rows], self.values[:, rows]

    def prefill(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, vocabulary] after tokens [B, P]."""
        num_rows, length = tokens.shape
        part = max(1, _MAX_SCORES // (self.num_heads * length * length))
        parts = [self._run(tokens[i : i + part], slice(i, i + part)) for i in range(0, num_rows, part)]
        self.length = length
        return torch.cat(parts)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, vocabulary] after one more token of each row, tokens [B, 1]."""
        logits = self._run(tokens, slice(None))
        self.length += 1
        return logits

    def _run(self, tokens: Tensor, rows: slice) -> Tensor:
        """Run tokens [rows, n], which follow `self.length` cached tokens, and return the last ones' logits [rows,
        vocabulary]. rows: their rows in the cache."""
        base, padding, end = self.model.base_model, self.padding[rows].unsqueeze(1), self.length + tokens.shape[1]
        positions = torch.arange(end, device=tokens.device)
        own = positions[self.length :]
        x = base.embed_tokens(tokens)
        angles = base.rotary_emb(x, (own - padding).clamp(min=0))
        # padding rows see themselves: a softmax over nothing is NaN
        masked = (positions > own.unsqueeze(1)) | ((positions < padding.unsqueeze(2)) & (positions != own.unsqueeze(1)))
        for index, layer in enumerate(base.layers):
            keys, values = self.keys[index, rows], self.values[index, rows]
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), angles, masked, keys, values)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: Tensor = self.model.get_output_embeddings()(base.norm(x[:, -1]))
        return logits

    def _attend(
        self,
        module: Any,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        masked: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Return the attention of x [B, n, H]. Writes its keys and values.

        angles: cos and sin [B, n, head_dim].
        masked: [B, n, length] bool, True where a row must not attend; the new rows are the last n columns.
        keys, values: [B, kv_heads, capacity, head_dim], written.
        """
        batch, count, _ = x.shape
        query, key, value = (
            project(x).view(batch, count, -1, self.head_dim)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):  # Qwen3
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *angles)
        end = masked.shape[-1]
        keys[:, :, end - count : end], values[:, :, end - count : end] = key, value.transpose(1, 2)
        grouped = query.reshape(batch, self.num_kv_heads, -1, self.head_dim) * self.head_dim**-0.5
        scores = (grouped @ keys[:, :, :end].transpose(-1, -2)).view(batch, self.num_heads, count, end)
        weights = torch.softmax(scores.masked_fill(masked.unsqueeze(1), float("-inf")), dim=-1, dtype=torch.float32)
        attended = weights.to(x.dtype).view(*grouped.shape[:3], end) @ values[:, :, :end]
        mixed = attended.view(batch, self.num_heads, count, self.head_dim).transpose(1, 2).flatten(2)
        out: Tensor = module.o_proj(mixed)
        return out
