"""Tiny random models of images and text, with the image processor of their family, and their greedy answers by
transformers."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Picture
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from aerie.workers.config import ModelSource
from aerie.workers.prompt_inputs import Image, PromptInputs
from aerie.workers.scheduling.plan import pack_i32
from aerie.workers.vision.config import VisionConfig, vision_of
from aerie.workers.vision.positions import mrope_positions
from aerie.workers.vision.processor import ImageJob, load_processor, prepared
from tests.support.tiny_models import HYBRID, VOCAB

IMAGE_TOKEN, START_TOKEN, END_TOKEN, VIDEO_TOKEN = VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4
PATCH, MERGE = 4, 2
MAX_PIXELS = 40 * 40  # 100 patches, 25 tokens
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
QWEN3 = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 64, "num_position_embeddings": 36}
THREE = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
# model_type -> fields of the text part, and of the tower
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, {"embed_dim": 16, "hidden_size": 64}),
    "qwen2_5_vl": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
        | {"window_size": 16},
    ),
    "qwen3_vl": ({"head_dim": 32, "rope_scaling": THREE}, QWEN3 | {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": (
        HYBRID
        | {"head_dim": 32, "rope_parameters": THREE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
        QWEN3,
    ),
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
KINDS["qwen3_vl_moe"] = KINDS["qwen3_vl"][0] | MOE, KINDS["qwen3_vl"][1]
KINDS["qwen3_5_moe"] = KINDS["qwen3_5"][0] | MOE | {"shared_expert_intermediate_size": 32}, QWEN3


def make_image_model(folder: Path, kind: str, seed: int = 5) -> Any:
    """Save a tiny random model of images and text, and its image processor. Return the model."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text, tower = KINDS[kind]
    config = CONFIG_MAPPING[kind](
        text_config=TEXT | text,
        vision_config=TOWER | tower,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=START_TOKEN,
        vision_end_token_id=END_TOKEN,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    sizes = {"min_pixels": 4 * PATCH * PATCH, "max_pixels": MAX_PIXELS}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, **sizes).save_pretrained(folder)
    return model


def picture(seed: int, width: int, height: int) -> Any:
    """A random picture with large patches of colour, as a PIL image."""
    values = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Picture.fromarray(values).resize((width, height), Picture.Resampling.NEAREST)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


class ImagePrompts:
    """Prompts of one model: texts of token ids with pictures between them."""

    def __init__(self, folder: Path) -> None:
        vision = vision_of(ModelSource(path=str(folder)))
        assert vision is not None
        self.vision: VisionConfig = vision
        self._processor = load_processor(str(folder))

    def of(self, parts: Sequence[Any]) -> tuple[list[int], PromptInputs | None]:
        """Return the tokens and inputs of a prompt. parts: token ids, and PIL images."""
        ids, images = list[int](), list[Image]()
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            found = prepared(ImageJob(file_of(part), 1 << 24, 1 << 22, IMAGE_TOKEN, MERGE), self._processor)
            assert not found.fault
            count = found.num_rows
            images.append(Image.of(len(ids) + 1, count, found.grid, found.data))
            ids += [START_TOKEN, *[IMAGE_TOKEN] * count, END_TOKEN]
        if not images:
            return ids, None
        positions = mrope_positions(len(ids), images, MERGE)
        return ids, PromptInputs(positions=pack_i32(positions), images=tuple(images), num_axes=3)

    def by_transformers(self, model: Any, parts: Sequence[Any], num_tokens: int) -> list[int]:
        """Return the greedy answer of transformers' own processor and model."""
        ids, _ = self.of(parts)
        given: dict[str, Any] = {}
        pictures = [part for part in parts if not isinstance(part, int)]
        if pictures:
            given = dict(self._processor(images=pictures, return_tensors="pt"))
            given["mm_token_type_ids"] = (torch.tensor([ids]) == IMAGE_TOKEN).int()
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, **given
        )
        return list(out[0, len(ids) :].tolist())


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = {
    "<|vision_start|>": START_TOKEN,
    "<|vision_end|>": END_TOKEN,
    "<|image_pad|>": IMAGE_TOKEN,
    "<|im_start|>": VOCAB - 5,
    "<|im_end|>": VOCAB - 6,
}
LETTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?!<|>_"


def add_tokenizer(folder: Path) -> None:
    """Save a tokenizer of letters and the family's chat template beside a model."""
    ids = {letter: i + 2 for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(ids | {"[UNK]": 0, "[EOS]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    by_id = {token: text for text, token in SPECIAL.items()}
    fillers = [f"<|{i}|>" for i in range(len(LETTERS) + 2, min(by_id))]
    tokenizer.add_special_tokens([*fillers, *(by_id.get(i, "<|video_pad|>") for i in range(min(by_id), VOCAB))])
    assert all(tokenizer.token_to_id(text) == token for text, token in SPECIAL.items())
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
