"""The table of pipelines: which parts of each encode a prompt, and how to ask its own code for the values.

A row describes one class of diffusers 0.42, read in its ``encode_prompt`` and ``__call__``. Lengths are the
defaults of ``__call__``, which a user of the pipeline gets. No torch here: the functions call methods of a pipeline.

``masked``: the text encoder gets the attention mask, so shorter padding gives the same values for the tokens of the
text. ``trim``: the model ignores padding, or gets zeros in its place, so padding need not be stored. Flux, Stable
Diffusion 1 to 3 and Flux.2 attend to the embeddings of padding: their sequences are stored at full length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from latentcache.value import Value

Run = Callable[[Any, list[str], Any, int, Mapping[str, Any]], Any]
Configs = Mapping[str, Mapping[str, Any]]
"""Part of a pipeline -> its configuration."""


class Output(Value):
    """One output of a prompt, and how a pipeline makes it."""

    parts: tuple[str, ...]
    """Text encoders that are loaded; each has its tokenizer."""
    run: Run
    """``(pipeline, texts, device, length, arguments)`` -> (B, ...) tensor, or a list of tensors without padding."""
    width: tuple[tuple[str, str], ...]
    """Values of one vector: (part, field of its configuration), added up."""
    length: int
    """Tokens by default; 1 for a vector."""
    fixed: bool = False
    """True: the length is a property of the model and no option."""
    masked: bool = False
    pads: bool = True
    """True: the tokenizer pads to the length; False: to the longest text of a call."""
    drop: int = 0
    """Tokens of a template in front, which are encoded and not kept."""
    before: int = 0
    """Tokens of other text encoders that are part of the length; no option changes their number."""
    trim: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``encode_prompt`` whose defaults ``__call__`` replaces."""
    libraries: tuple[str, ...] = ()
    """Optional libraries that clean the text before it is encoded, if they are installed."""

    def width_of(self, configs: Configs) -> int:
        """Values of one vector; a field may be in the configuration of a text model inside."""
        fields = ((configs[part], name) for part, name in self.width)
        return sum(int(config[name] if name in config else config["text_config"][name]) for config, name in fields)


_FIRST_ENCODER = ("text_encoder",)
_TWO_ENCODERS = ("text_encoder", "text_encoder_2")
_PLAIN = {"do_classifier_free_guidance": False}
#: ``complex_human_instruction`` of ``SanaPipeline.__call__`` is read from the installed class when it is opened.
FROM_CALL = "default of __call__"


def _encode(pipe: Any, texts: list[str], device: Any, length: int, arguments: Mapping[str, Any]) -> Any:
    """First result of ``encode_prompt`` for a class that takes ``max_sequence_length``."""
    return pipe.encode_prompt(texts, device=device, max_sequence_length=length, **arguments)[0]


def _fixed(position: int) -> Run:
    """A result of ``encode_prompt``, by its position, for a class with one length."""

    def run(pipe: Any, texts: list[str], device: Any, length: int, arguments: Mapping[str, Any]) -> Any:
        return pipe.encode_prompt(texts, device=device, num_images_per_prompt=1, **arguments)[position]

    return run


def _stable_diffusion_3(pipe: Any, texts: list[str], device: Any, length: int, arguments: Mapping[str, Any]) -> Any:
    tokens = length - pipe.tokenizer_max_length
    return pipe.encode_prompt(texts, None, None, device=device, max_sequence_length=tokens, **arguments)[0]


def _pooled_3(pipe: Any, texts: list[str], device: Any, length: int, arguments: Mapping[str, Any]) -> Any:
    """Both vectors of CLIP, as ``encode_prompt`` joins them; the T5 encoder is not needed."""
    import torch

    both = [pipe._get_clip_prompt_embeds(texts, device=device, clip_model_index=number)[1] for number in (0, 1)]
    return torch.cat(both, dim=-1)


def _flux(pipe: Any, texts: list[str], device: Any, length: int, arguments: Mapping[str, Any]) -> Any:
    dtype = pipe.text_encoder_2.dtype
    return pipe._get_t5_prompt_embeds(texts, max_sequence_length=length, device=device, dtype=dtype)


def _flux_pooled(pipe: Any, texts: list[str], device: Any, length: int, arguments: Mapping[str, Any]) -> Any:
    return pipe._get_clip_prompt_embeds(texts, device=device)


def _with_mask(pipe: Any, texts: list[str], device: Any, length: int, arguments: Mapping[str, Any]) -> list[Any]:
    """Sequences without padding, by the mask that ``encode_prompt`` gives as its second result."""
    embeds, mask, *_ = pipe.encode_prompt(texts, device=device, max_sequence_length=length, **arguments)
    if mask is None:  # Qwen-Image: no sequence has padding
        return list(embeds)
    return [sequence[kept.bool()] for sequence, kept in zip(embeds, mask, strict=True)]


def _sequence(parts: tuple[str, ...], run: Run, width: Any, length: int, **more: Any) -> dict[str, Output]:
    return {"prompt_embeds": Output(parts=parts, run=run, width=width, length=length, **more)}


def _vector(parts: tuple[str, ...], run: Run, width: Any, **more: Any) -> dict[str, Output]:
    return {"pooled_prompt_embeds": Output(parts=parts, run=run, width=width, length=1, **more)}


def _trimmed(run: Run, length: int, size: str = "hidden_size", **more: Any) -> dict[str, Output]:
    """The sequence of one text encoder, without padding."""
    return _sequence(_FIRST_ENCODER, run, (("text_encoder", size),), length, trim=True, **more)


_FIRST, _SECOND = ("text_encoder", "hidden_size"), ("text_encoder_2", "hidden_size")
_PROJECTED = ("text_encoder_2", "projection_dim")
_CLEANED = {"libraries": ("ftfy", "beautifulsoup4"), "arguments": _PLAIN | {"clean_caption": True}}

PIPELINES: Mapping[str, Mapping[str, Output]] = {
    "StableDiffusionPipeline": _sequence(_FIRST_ENCODER, _fixed(0), (_FIRST,), 77, fixed=True, arguments=_PLAIN),
    # Without the first text encoder ``encode_prompt`` runs the second one alone, which gives the pooled vector.
    "StableDiffusionXLPipeline": {
        **_sequence(_TWO_ENCODERS, _fixed(0), (_FIRST, _SECOND), 77, fixed=True, arguments=_PLAIN),
        **_vector(("text_encoder_2",), _fixed(2), (_PROJECTED,), arguments=_PLAIN),
    },
    "StableDiffusion3Pipeline": {
        **_sequence(
            (*_TWO_ENCODERS, "text_encoder_3"),
            _stable_diffusion_3,
            (("text_encoder_3", "d_model"),),
            77 + 256,
            before=77,
            arguments=_PLAIN,
        ),
        **_vector(_TWO_ENCODERS, _pooled_3, (("text_encoder", "projection_dim"), _PROJECTED)),
    },
    "FluxPipeline": {
        **_sequence(("text_encoder_2",), _flux, (("text_encoder_2", "d_model"),), 512),
        **_vector(_FIRST_ENCODER, _flux_pooled, (_FIRST,)),
    },
    # Three layers of the language model side by side: ``text_encoder_out_layers``.
    "Flux2KleinPipeline": _sequence(_FIRST_ENCODER, _encode, (_FIRST,) * 3, 512),
    "QwenImagePipeline": _trimmed(_with_mask, 512, masked=True, pads=False, drop=34),
    "SanaPipeline": _trimmed(
        _with_mask, 300, masked=True, arguments=_PLAIN | {"complex_human_instruction": FROM_CALL}
    ),
    "Lumina2Pipeline": _trimmed(_with_mask, 256, masked=True, arguments=_PLAIN),
    "PixArtSigmaPipeline": _trimmed(_with_mask, 300, "d_model", masked=True, **_CLEANED),
    # Zeros take the place of padding, and the model attends to them: the loader pads with zeros to the full length.
    "WanPipeline": _trimmed(_encode, 512, "d_model", masked=True, arguments=_PLAIN, libraries=("ftfy",)),
    # T5 gets no mask, so its values depend on the full length; the transformer gets the mask.
    "LTXPipeline": _trimmed(_with_mask, 128, "d_model", arguments=_PLAIN),
    "ZImagePipeline": _trimmed(_encode, 512, masked=True, arguments=_PLAIN),
}  # fmt: skip


def outputs_of(pipeline: str) -> Mapping[str, Output]:
    """Map fields to outputs of a pipeline; the parts of token ids are all its text encoders, in their order."""
    row = PIPELINES[pipeline]
    parts = tuple(sorted({part for output in row.values() for part in output.parts}))
    return {**row, "prompt_ids": replace(row["prompt_embeds"], parts=parts, width=())}


def tokenizing_runs(pipeline: str) -> Sequence[Output]:
    """Choose outputs whose runs together call every tokenizer of a pipeline once."""
    runs = list[Output]()
    parts = set[str]()
    for output in PIPELINES[pipeline].values():
        if not parts.issuperset(output.parts):
            runs.append(output)
            parts.update(output.parts)
    return runs


def tokenizer_of(part: str) -> str:
    """Folder of the tokenizer of a text encoder: ``text_encoder_2`` has ``tokenizer_2``."""
    return part.replace("text_encoder", "tokenizer")
