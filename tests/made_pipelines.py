"""Tiny diffusion pipelines with random weights, saved in the layout of diffusers."""

from __future__ import annotations

import inspect
import string
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

#: Sizes of every small language model here.
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
LETTERS = string.ascii_lowercase + string.digits + ".,-"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>{% endif %}{% endif %}"
)


def flux_transformer(text, pooled):
    return diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=text, pooled_projection_dim=pooled, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def sd3_transformer(text, pooled):
    return diffusers.SD3Transformer2DModel(
        in_channels=16, out_channels=16, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        caption_projection_dim=16, joint_attention_dim=text, pooled_projection_dim=pooled, sample_size=64,
        pos_embed_max_size=64,
    )  # fmt: skip


def tiny_unet(text, pooled=0):
    """A denoiser for embeddings of these widths; SDXL's if there are pooled ones."""
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8} if pooled else {}
    more |= {"projection_class_embeddings_input_dim": pooled + 6 * 8} if pooled else {}
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=text, **more,
    )  # fmt: skip


def clip_tokenizer():
    pieces = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(letter + "</w>" for letter in LETTERS)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def gemma_tokenizer():
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS, *(f"<0x{n:02X}>" for n in range(256))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return transformers.GemmaTokenizer(vocab=vocab, merges=[], model_max_length=512)


def qwen_tokenizer():
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=2048)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def clip(cls=transformers.CLIPTextModel, hidden=16, projection=12):
    size = {"vocab_size": 100, "hidden_size": hidden, "intermediate_size": 2 * hidden, "projection_dim": projection}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return cls(transformers.CLIPTextConfig(**size, **ids, num_hidden_layers=2, num_attention_heads=2))


def t5(cls=transformers.T5EncoderModel, config=transformers.T5Config, width=32):
    return cls(config(vocab_size=64, d_model=width, d_kv=8, d_ff=64, num_layers=2, num_heads=2))


def qwen3(layers=3):
    more = {"head_dim": 8, "max_position_embeddings": 2048}
    return transformers.Qwen3Config(**SMALL, **more, vocab_size=300, num_hidden_layers=layers)


def qwen_vl():
    text = SMALL | {"vocab_size": 300, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gemma2():
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.Gemma2Model(
        transformers.Gemma2Config(**SMALL, **ids, vocab_size=400, num_hidden_layers=2, head_dim=8)
    )


def tiny_vae(channels=4, scaling=0.13025, shift=None):
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        latent_channels=channels,
        scaling_factor=scaling,
        shift_factor=shift,
    )


def parts_of(name: str) -> dict[str, Any]:
    """Create the random text encoders and tokenizers of a pipeline."""
    projected = transformers.CLIPTextModelWithProjection
    match name:
        case "StableDiffusionPipeline":
            return {"text_encoder": clip(), "tokenizer": clip_tokenizer()}
        case "StableDiffusionXLPipeline":
            both = {"text_encoder": clip(), "text_encoder_2": clip(projected, hidden=24)}
            return both | {"tokenizer": clip_tokenizer(), "tokenizer_2": clip_tokenizer()}
        case "StableDiffusion3Pipeline":
            both = {"text_encoder": clip(projected, 16, 16), "text_encoder_2": clip(projected, 16, 16)}
            both |= {"tokenizer": clip_tokenizer(), "tokenizer_2": clip_tokenizer()}
            return both | {"text_encoder_3": t5(width=48), "tokenizer_3": t5_tokenizer()}
        case "FluxPipeline":
            both = {"text_encoder": clip(), "text_encoder_2": t5()}
            return both | {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()}
        case "Flux2KleinPipeline":
            model = transformers.Qwen3ForCausalLM(qwen3(layers=28))
            return {"text_encoder": model, "tokenizer": qwen_tokenizer()}
        case "QwenImagePipeline":
            return {"text_encoder": qwen_vl(), "tokenizer": qwen_tokenizer()}
        case "SanaPipeline" | "Lumina2Pipeline":
            return {"text_encoder": gemma2(), "tokenizer": gemma_tokenizer()}
        case "WanPipeline":
            encoder = t5(transformers.UMT5EncoderModel, transformers.UMT5Config)
            return {"text_encoder": encoder, "tokenizer": t5_tokenizer()}
        case "ZImagePipeline":
            return {"text_encoder": transformers.Qwen3Model(qwen3()), "tokenizer": qwen_tokenizer()}
        case _:  # PixArt-Sigma, LTX-Video
            return {"text_encoder": t5(), "tokenizer": t5_tokenizer()}


def make_pipeline(name: str, folder: Path, *, seed: int = 0, vae: Any = None, **parts: Any) -> Any:
    """Save a pipeline without transformer and scheduler, and return it; ``parts`` are in the place of its own."""
    torch.manual_seed(seed)
    cls = getattr(diffusers, name)
    given = parts_of(name) | parts | {"vae": vae}
    parameters = inspect.signature(cls.__init__).parameters
    wanted = {one: None for one in parameters if parameters[one].default is inspect.Parameter.empty and one != "self"}
    more = {"requires_safety_checker": False} if "requires_safety_checker" in parameters else {}
    pipe = cls(**wanted | given | more)
    for part in given.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipe.save_pretrained(folder)
    return pipe
