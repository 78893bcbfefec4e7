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
from tests.support.tiny_models import FAMILY_SETTINGS, HYBRID, VOCAB

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
# Gemma's images are larger than its windows of 12 tokens.
GEMMA_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GEMMA_TOWER |= {"patch_size": PATCH, "initializer_range": 0.2}
KINDS["gemma3"] = (
    FAMILY_SETTINGS["Gemma3"] | {"head_dim": 16},
    GEMMA_TOWER | {"image_size": 10 * PATCH},  # 25 tokens
)
KINDS["gemma4"] = (
    FAMILY_SETTINGS["Gemma4"] | {"head_dim": 16, "use_bidirectional_attention": "vision"},
    GEMMA_TOWER
    | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64, "standardize": True}
    | {"use_clipped_linears": True, "pooling_kernel_size": 3},
)
MAX_TOKENS = {"gemma4": 70}  # of an image; 25 in other families


def make_image_model(folder: Path, kind: str, seed: int = 5) -> Any:
    """Save a tiny random model of images and text, and its image processor. Return the model."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text, tower = KINDS[kind]
    names = ("boi_token_index", "eoi_token_index") if kind == "gemma3" else ("boi_token_id", "eoi_token_id")
    own: dict[str, Any] = dict(zip(names, (START_TOKEN, END_TOKEN), strict=True))
    if kind.startswith("qwen"):
        own = {"video_token_id": VIDEO_TOKEN, "vision_start_token_id": START_TOKEN, "vision_end_token_id": END_TOKEN}
        tower = TOWER | tower
    config = CONFIG_MAPPING[kind](
        text_config=TEXT | text,
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
        **({"mm_tokens_per_image": 25} if kind == "gemma3" else {}),
        **own,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            if "mm_input_projection" in name or "position_embedding_table" in name:
                parameter.normal_(0.0, 0.2)
        if kind == "gemma4":  # transformers computes an answer's placeholders as padding
            model.lm_head.weight[VIDEO_TOKEN:] = 0.0
        for name, buffer in model.named_buffers():
            if name.endswith(("std_bias", "std_scale")):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith(("_min", "_max")):  # of clipped products
                buffer.fill_(-0.5 if name.endswith("_min") else 0.7)
    model.save_pretrained(folder)
    if kind == "gemma3":
        size = {"height": tower["image_size"], "width": tower["image_size"]}
        Gemma3ImageProcessorPil(size=size).save_pretrained(folder)
        return model
    if kind == "gemma4":
        Gemma4ImageProcessorPil(patch_size=PATCH, max_soft_tokens=MAX_TOKENS[kind]).save_pretrained(folder)
        return model
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
            vision = self.vision
            job = ImageJob(file_of(part), 1 << 24, vision.max_pixels, vision.placeholder, vision.patch_size)
            found = prepared(job, self._processor)
            assert not found.fault, found.fault
            count = found.num_rows
            images.append(Image.of(len(ids) + 1, count, found.grid, found.data))
            ids += [START_TOKEN, *[vision.filler_id] * count, END_TOKEN]
        if not images:
            return ids, None
        if not self.vision.has_mrope:
            return ids, PromptInputs(images=tuple(images))
        positions = mrope_positions(len(ids), images, MERGE)
        return ids, PromptInputs(positions=pack_i32(positions), images=tuple(images), num_axes=3)

    def by_transformers(self, model: Any, parts: Sequence[Any], num_tokens: int) -> list[int]:
        """Return the greedy answer of transformers' own processor and model."""
        ids, inputs = self.of(parts)
        given: dict[str, Any] = {}
        pictures = [part for part in parts if not isinstance(part, int)]
        if pictures and inputs is not None:
            for image in inputs.images:
                ids[image.start : image.end] = [IMAGE_TOKEN] * image.num_rows
            given = dict(self._processor(images=pictures, return_tensors="pt"))
            for name in ("num_crops", "num_soft_tokens_per_image"):
                given.pop(name, None)
            types = "token_type_ids" if self.vision.family.model_package == "gemma3" else "mm_token_type_ids"
            given[types] = (torch.tensor([ids]) == IMAGE_TOKEN).int()
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


GEMMA = {
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_image>"),
    "gemma4": ("<|image>", "<image|>", "<|image|>", "<|image|>"),
}


def add_tokenizer(folder: Path, kind: str = "") -> None:
    """Save a tokenizer of letters and the family's chat template beside a model."""
    special, template = SPECIAL, CHAT_TEMPLATE
    if kind in GEMMA:
        texts = GEMMA[kind]
        own = dict(zip(texts, (START_TOKEN, END_TOKEN, IMAGE_TOKEN), strict=False))
        special = own | {name: SPECIAL[name] for name in ("<|im_start|>", "<|im_end|>")}
        template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", texts[3])
    ids = {letter: i + 2 for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(ids | {"[UNK]": 0, "[EOS]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    by_id = {token: text for text, token in special.items()}
    fillers = [f"<|{i}|>" for i in range(len(LETTERS) + 2, min(by_id))]
    tokenizer.add_special_tokens([*fillers, *(by_id.get(i, "<|video_pad|>") for i in range(min(by_id), VOCAB))])
    assert all(tokenizer.token_to_id(text) == token for text, token in special.items())
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
