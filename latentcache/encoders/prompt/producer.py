"""Make the embeddings of captions in a worker, with the code of the pipeline itself.

Guarantee: the values are those of the class's own ``encode_prompt`` for the same text. A long caption is truncated as
the pipeline does it, and the tokens beyond its length are counted. Only the text encoders of the output are loaded,
from safetensors. If the text encoder gets the mask, captions of similar length are encoded together, padded to the
longest of them.
"""

from __future__ import annotations

import gc
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.encoders.prompt.describe import Part, Pipeline, locate_pipeline
from latentcache.encoders.prompt.pipelines import tokenizer_of
from latentcache.fields.dtypes import as_floats, stored
from latentcache.fields.noise import EXACT, measured
from latentcache.fields.prompt_embeds import PromptRecipe
from latentcache.fields.protocol import Made, Prepared, Producer, ProducerContext

#: Tokens of one call of the text encoders, padding included: enough to fill a GPU; on a CPU more is slower. Sorted
#: captions get fewer, because more in a call differ more in length: 512 with 60 tokens each are 0.88 of their padded
#: length at 4096 tokens, and 0.79 at 8192.
_TOKENS, _SORTED_TOKENS, _CPU_TOKENS = 8192, 4096, 2048
#: Padded lengths are multiples of this number of tokens.
_STEP = 8
#: Words whose embeddings alone and beside others show the noise.
_PROBES = ("a photo of a red bicycle", "a very long caption, " * 12)


class PromptProducer(Producer):
    """Embeddings of captions; opened with the folder of a ``pipeline``, or the ``stub`` and its delay."""

    def __init__(self, producer: Mapping[str, Any], recipe: PromptRecipe, context: ProducerContext) -> None:
        self._about, self._recipe, self._context = producer, recipe, context
        self._encoder: _Stub | _PipelineEncoder | None = None

    def open(self) -> None:
        """See :class:`Producer`."""
        if "stub" in self._about:
            self._encoder, self.noise = _Stub(self._about["stub"], self._recipe), EXACT
            return
        pipeline = locate_pipeline(self._about["pipeline"], self._recipe.output)
        self._encoder = encoder = _PipelineEncoder(pipeline, self._recipe, self._context.device)
        self.device = encoder.device
        alone, beside = (as_floats(encoder.encode(texts)[0][0]) for texts in (_PROBES[:1], _PROBES))
        self.noise = {"devices": [self.device], **measured(alone, beside)}

    def encode(self, batch: Sequence[Prepared]) -> list[Made]:
        """See :class:`Producer`."""
        assert self._encoder is not None
        captions = [(str(item.value.inputs["caption"]["text"]), item.output.variant) for item in batch]
        texts = [self._recipe.text(caption, variant) for caption, variant in captions]
        return [Made(array=array, columns=columns) for array, columns in self._encoder.encode(texts)]

    def close(self) -> None:
        """Free the memory of the device."""
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None


class _Stub:
    """Documented stand-in: one token per word, whose values follow from the word. NumPy only."""

    def __init__(self, delay_ms: int, recipe: PromptRecipe) -> None:
        self._delay_s, self._recipe = delay_ms / 1000, recipe

    def encode(self, texts: Sequence[str]) -> list[tuple[NDArray[Any], dict[str, Any]]]:
        """The values of each caption, and how many words are beyond the length."""
        time.sleep(self._delay_s * len(texts))
        recipe, found = self._recipe, list[tuple[NDArray[Any], dict[str, Any]]]()
        for text in texts:
            words = ["", *text.split()] if recipe.is_sequence else [text]
            kept, repeats = words[: recipe.length], recipe.width // 16 + 1
            seeds = [(xxhash.xxh3_128_digest(word.encode()) * repeats)[: recipe.width] for word in kept]
            # Whole numbers from -128 to 127, over 64: every storage type holds them.
            rows = np.frombuffer(b"".join(seeds), dtype=np.int8).reshape(-1, recipe.width).astype(np.float32)
            rows /= 64
            array = stored(rows if recipe.is_sequence else rows[0], recipe.storage_dtype)
            found.append((array, {"cut": len(words) - len(kept)}))
        return found

    def close(self) -> None:
        """Nothing is held."""


class Stop(Exception):  # noqa: N818 - not an error
    """The text encoder would run now."""


def stop(*_: Any) -> None:
    """Hook before the forward of a text encoder that must not run."""
    raise Stop


class _Length(NamedTuple):
    """Tokens of one text: of them all, padded, and beyond the length of the pipeline."""

    tokens: int
    padded: int
    cut: int


class _Call(NamedTuple):
    """Some captions on the device."""

    numbers: list[int]
    values: Any
    """A tensor, or a list of tensors without padding."""
    lengths: list[_Length]


class _PipelineEncoder:
    """The text encoders of a pipeline, and its class without everything else."""

    def __init__(self, pipeline: Pipeline, recipe: PromptRecipe, device: str) -> None:
        import torch

        from latentcache.encoders.faults import Translator
        from latentcache.encoders.vae.encoder import choose_device, device_name

        self._torch, self._recipe = torch, recipe
        self._output = pipeline.output
        self._device = choose_device(device)
        tokens = _SORTED_TOKENS if pipeline.output.masked else _TOKENS
        self._budget = _CPU_TOKENS if self._device.type == "cpu" else tokens
        self.device = device_name(self._device)
        self._errors = Translator(device=self._device, name=recipe.pipeline, label=str(pipeline.folder))
        self._seen: list[_Length] = []
        self._arguments = {name: json.loads(value) for name, value in recipe.arguments if not name.startswith("has ")}
        self._pipe = self._errors.run(lambda: self._opened(pipeline), "its text encoders")

    def encode(self, texts: Sequence[str]) -> list[tuple[NDArray[Any], dict[str, Any]]]:
        """The values of each caption, and how many of its tokens are beyond the length."""
        embeddings = dict[int, tuple[NDArray[Any], dict[str, Any]]]()
        before: _Call | None = None
        for call in chain(self._calls(texts), [None]):
            if before is not None:  # the device works on the next call while this one is fetched
                embeddings.update(self._fetched(before))
            before = call
        return [embeddings[number] for number in range(len(texts))]

    def _calls(self, texts: Sequence[str]) -> Iterator[_Call]:
        """Begin to encode the captions, the longest first."""
        output, longest = self._output, self._recipe.length
        order = list(range(len(texts)))
        lengths = [_Length(longest, longest, 0)] * len(texts)
        if output.masked:
            lengths = self._measured(texts)
            order.sort(key=lambda number: lengths[number].tokens)
        while order:
            count = max(1, self._budget // max(lengths[order[-1]].tokens, 1))
            numbers, order = order[-count:], order[:-count]
            spare = min(lengths[number].padded - lengths[number].tokens for number in numbers)
            spare = spare // _STEP * _STEP if output.pads else 0
            yield _Call(numbers, *self._run([texts[number] for number in numbers], longest - spare))

    def _fetched(self, call: _Call) -> Iterator[tuple[int, tuple[NDArray[Any], dict[str, Any]]]]:
        """Number of each caption of a call, and its result."""
        output = self._output
        values = self._errors.run(lambda: self._stored(call.values), f"{len(call.numbers)} captions")
        for number, value, length in zip(call.numbers, values, call.lengths, strict=True):
            if output.trim and not isinstance(call.values, list):
                value = value[: length.tokens].copy()
            dropped = 0 if output.pads else max(length.tokens - output.drop - self._recipe.length, 0)
            yield number, (value, {"cut": length.cut + dropped})

    def close(self) -> None:
        """Free the memory of the device."""
        self._pipe = None
        gc.collect()
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _run(self, texts: list[str], length: int) -> tuple[Any, list[_Length]]:
        """A tensor, or sequences without padding, of texts padded to a length; lengths of the first tokenizer."""
        self._seen.clear()

        def encoded() -> Any:
            with self._torch.inference_mode(), suppress(Stop):
                return self._output.run(self._pipe, list(texts), self._device, length, self._arguments)

        values, full = self._errors.run(encoded, f"{len(texts)} captions"), self._recipe.length
        seen = self._seen[: len(texts)]
        return values, seen if len(seen) == len(texts) else [_Length(full, full, 0)] * len(texts)

    def _measured(self, texts: Sequence[str]) -> list[_Length]:
        """The length of each text; the text encoders stop before they run."""
        with ExitStack() as hooks:
            for part in self._output.parts:
                hooks.enter_context(getattr(self._pipe, part).register_forward_pre_hook(stop))
            return self._run(list(texts), self._recipe.length)[1]

    def _stored(self, values: Any) -> list[NDArray[Any]]:
        """The arrays of a tensor, or of a list of tensors, in the storage type."""
        if isinstance(values, list):
            return [self._stored(value[None])[0] for value in values]
        kept = values.float().to(getattr(self._torch, self._recipe.storage_dtype)).contiguous().cpu()
        bits = kept.view(self._torch.uint16) if kept.dtype == self._torch.bfloat16 else kept
        return list(bits.numpy())

    def _opened(self, pipeline: Pipeline) -> Any:
        """The pipeline with the text encoders of this output, and None for every other part."""
        import transformers

        transformers.utils.logging.disable_progress_bar()

        def model_of(part: Part) -> Any:
            model, found = getattr(transformers, part.cls).from_pretrained(
                part.folder,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                dtype=getattr(self._torch, self._recipe.compute_dtype),
                device_map=str(self._device),
            )
            if missing := sorted(found["missing_keys"]):
                raise ValueError(f"{part.name} lacks {len(missing)} tensors; the first is {missing[0]}")
            return model

        return assembled(pipeline, model_of, self._note)

    def _note(
        self, part: str, texts: Sequence[str], result: Any, tokenize: Callable[..., Any], is_padded: bool
    ) -> None:
        """Keep the length of each text, and how much is cut."""
        for text, ids, mask in zip(texts, result["input_ids"], result["attention_mask"], strict=True):
            used = int(sum(mask))
            whole = len(tokenize(text)["input_ids"]) if used == len(ids) else used
            self._seen.append(_Length(used, len(ids), max(whole - used, 0)))


def assembled(pipeline: Pipeline, model_of: Callable[[Part], Any], note: Callable[..., None]) -> Any:
    """A pipeline of models that ``model_of`` gives for its parts, and None for every other part.

    Every call of a tokenizer that truncates is told to ``note(part, texts, result, tokenize, is_padded)``.
    """
    import diffusers
    import transformers

    # Both warn of each caption that is too long, with its text; the column "cut" counts them.
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    given: dict[str, Any] = {}
    for part in pipeline.parts:
        tokenizer = getattr(transformers, part.tokenizer_cls).from_pretrained(part.tokenizer, local_files_only=True)
        given[part.name] = model_of(part).eval().requires_grad_(False)
        given[tokenizer_of(part.name)] = _watched(tokenizer, partial(note, part.name))
    cls = getattr(diffusers, pipeline.cls)
    parameters = inspect.signature(cls.__init__).parameters
    wanted = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
    given = {name: None for name in wanted if name != "self"} | given
    if "requires_safety_checker" in parameters:
        given["requires_safety_checker"] = False
    return cls(**given)


def _watched(tokenizer: Any, note: Callable[..., None]) -> Any:
    """The tokenizer, which also tells ``note`` of each call that truncates."""
    base = type(tokenizer)

    def call(own: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        result = base.__call__(own, text, *args, **options)
        if options.get("truncation"):
            texts = [text] if isinstance(text, str) else text
            note(texts, result, partial(base.__call__, own), options.get("padding") == "max_length")
        return result

    tokenizer.__class__ = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})
    return tokenizer


def call_default(pipeline: str, name: str) -> Any:
    """Default of an argument of a pipeline's ``__call__``; for a worker, because it imports diffusers."""
    import diffusers

    return inspect.signature(getattr(diffusers, pipeline).__call__).parameters[name].default
