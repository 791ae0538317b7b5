"""Make the embeddings and the token ids of captions in a worker, with the code of the pipeline itself.

Guarantee: embeddings are those of the class's own ``encode_prompt`` for the same text. A long caption is truncated as
the pipeline does it, and the tokens beyond its length are counted. Only the text encoders of the output are loaded,
from safetensors. If the text encoder gets the mask, captions of similar length are encoded together, padded to the
longest of them.

Ids and masks are those that ``encode_prompt`` gives its text encoders. It runs with text encoders that hold no
weights: the last one of each run stops it, others before it pass tensors on without values.
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

from latentcache.encoders.devices import Translator, choose_device, device_name
from latentcache.encoders.prompt.describe import Part, Pipeline, locate_pipeline
from latentcache.encoders.prompt.pipelines import tokenizer_of, tokenizing_runs
from latentcache.fields.dtypes import as_floats, stored
from latentcache.fields.prompt_embeds import PromptIdsRecipe, PromptRecipe
from latentcache.fields.protocol import Made, Prepared, Producer, ProducerContext
from latentcache.fields.recipe import EXACT, measured

#: Tokens of one call of the text encoders, padding included: enough to fill a GPU; on a CPU more is slower. Sorted
#: captions get fewer, because more in a call differ more in length: 512 with 60 tokens each are 0.88 of their padded
#: length at 4096 tokens, and 0.79 at 8192.
_TOKENS, _SORTED_TOKENS, _CPU_TOKENS = 8192, 4096, 2048
#: Padded lengths are multiples of this number of tokens.
_STEP = 8
#: Words whose embeddings alone and beside others show the noise.
_PROBES = ("a photo of a red bicycle", "a very long caption, " * 12)
Embeddings = list[tuple[NDArray[Any], dict[str, Any]]]
"""The values of each caption, and its columns: ``cut``, how many of its tokens are beyond the length."""


def _texts(batch: Sequence[Prepared], recipe: PromptRecipe) -> list[str]:
    captions = [(str(item.value.inputs["caption"]["text"]), item.output.variant) for item in batch]
    return [recipe.text(caption, variant) for caption, variant in captions]


class PromptProducer(Producer):
    """Embeddings of captions; opened with the folder of a ``pipeline``, or the ``stub`` and its delay."""

    def __init__(self, producer: Mapping[str, Any], recipe: PromptRecipe, context: ProducerContext) -> None:
        super().__init__(producer, recipe, context)
        self._opens = producer
        self._encoder: _Stub | _PipelineEncoder | None = None

    def open(self) -> None:
        """See :class:`Producer`."""
        if "stub" in self._opens:
            self._encoder = _Stub(self._opens["stub"], self.recipe)
            self.noise = EXACT
            return
        pipeline = locate_pipeline(self._opens["pipeline"], self.recipe.output)
        self._encoder = encoder = _PipelineEncoder(pipeline, self.recipe, self.context.device)
        self.device = encoder.device
        alone, beside = (as_floats(encoder.encode(texts)[0][0]) for texts in (_PROBES[:1], _PROBES))
        self.noise = {"devices": [self.device], **measured(alone, beside)}

    def encode(self, batch: Sequence[Prepared]) -> list[Made]:
        """See :class:`Producer`."""
        assert self._encoder is not None
        embeddings = self._encoder.encode(_texts(batch, self.recipe))
        return [Made(array=array, columns=columns) for array, columns in embeddings]

    def close(self) -> None:
        """Free the memory of the device."""
        if isinstance(self._encoder, _PipelineEncoder):
            self._encoder.close()
        self._encoder = None


class _Stub:
    """Documented stand-in: one token per word, whose values follow from the word. NumPy only."""

    def __init__(self, delay_ms: int, recipe: PromptRecipe) -> None:
        self._delay_s = delay_ms / 1000
        self._recipe = recipe

    def encode(self, texts: Sequence[str]) -> Embeddings:
        """Embed each caption."""
        time.sleep(self._delay_s * len(texts))
        recipe = self._recipe
        embeddings = Embeddings()
        for text in texts:
            words = ["", *text.split()] if recipe.is_sequence else [text]
            kept = words[: recipe.length]
            repeats = recipe.width // 16 + 1
            seeds = [(xxhash.xxh3_128_digest(word.encode()) * repeats)[: recipe.width] for word in kept]
            # Whole numbers from -128 to 127, over 64: every storage type holds them.
            rows = np.frombuffer(b"".join(seeds), dtype=np.int8).reshape(-1, recipe.width).astype(np.float32)
            rows /= 64
            array = stored(rows if recipe.is_sequence else rows[0], recipe.storage_dtype)
            embeddings.append((array, {"cut": len(words) - len(kept)}))
        return embeddings


class _Stop(Exception):  # noqa: N818 - not an error
    """Raised when a text encoder would run."""


def _stop(*_: Any) -> None:
    """Hook before the forward of a text encoder that must not run."""
    raise _Stop


class _Length(NamedTuple):
    """Tokens of a text: without padding, with padding, and those cut off."""

    tokens: int
    padded: int
    cut: int


class _Call(NamedTuple):
    """Captions that the device encodes in one call."""

    numbers: list[int]
    values: Any
    """A tensor, or a list of tensors without padding."""
    lengths: list[_Length]


class _Assembled:
    """A pipeline's class with its text encoders and tokenizers, and None for every other part."""

    def __init__(self, pipeline: Pipeline, recipe: PromptRecipe) -> None:
        self._output = pipeline.output
        self._recipe = recipe
        self._arguments = {name: json.loads(value) for name, value in recipe.arguments if not name.startswith("has ")}
        self._pipe: Any = None

    def _open(self, pipeline: Pipeline) -> Any:
        import diffusers
        import transformers

        # Both warn of each caption that is too long, with its text; the column "cut" counts them.
        diffusers.utils.logging.set_verbosity_error()
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        parts: dict[str, Any] = {}
        for part in pipeline.parts:
            tokenizer = getattr(transformers, part.tokenizer_cls).from_pretrained(
                part.tokenizer, local_files_only=True
            )
            model = self._model(part, getattr(transformers, part.cls))
            parts[part.name] = model.eval().requires_grad_(False)
            parts[tokenizer_of(part.name)] = _watched(tokenizer, partial(self._note, part.name))
        cls = getattr(diffusers, pipeline.cls)
        parameters = inspect.signature(cls.__init__).parameters
        needed = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
        parts = {name: None for name in needed if name != "self"} | parts
        if "requires_safety_checker" in parameters:
            parts["requires_safety_checker"] = False
        return cls(**parts)

    def _model(self, part: Part, cls: Any) -> Any:
        """Make the text encoder of a part."""
        raise NotImplementedError

    def _note(
        self, part: str, texts: Sequence[str], result: Any, tokenize: Callable[..., Any], is_padded: bool
    ) -> None:
        """Look at the result of a tokenizer that truncates; ``is_padded``: to the full length."""
        raise NotImplementedError


class _PipelineEncoder(_Assembled):
    """The text encoders of one output."""

    def __init__(self, pipeline: Pipeline, recipe: PromptRecipe, device: str) -> None:
        import torch

        super().__init__(pipeline, recipe)
        self._torch = torch
        self._device = choose_device(device)
        tokens = _SORTED_TOKENS if pipeline.output.masked else _TOKENS
        self._budget = _CPU_TOKENS if self._device.type == "cpu" else tokens
        self.device = device_name(self._device)
        self._errors = Translator(device=self._device, name=recipe.pipeline, label=str(pipeline.folder))
        self._seen: list[_Length] = []
        self._pipe = self._errors.run(lambda: self._open(pipeline), "its text encoders")

    def encode(self, texts: Sequence[str]) -> Embeddings:
        """Embed each caption."""
        embeddings = dict[int, tuple[NDArray[Any], dict[str, Any]]]()
        before: _Call | None = None
        for call in chain(self._calls(texts), [None]):
            if before is not None:  # the device works on the next call while this one is fetched
                embeddings.update(self._fetched(before))
            before = call
        return [embeddings[number] for number in range(len(texts))]

    def _calls(self, texts: Sequence[str]) -> Iterator[_Call]:
        """Begin to encode the captions, the longest first."""
        output = self._output
        longest = self._recipe.length
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
        """Fetch the embeddings of a call, with the number of each caption."""
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
        """Encode texts padded to a length: a tensor, or sequences without padding; and lengths of the texts."""
        self._seen.clear()

        def encoded() -> Any:
            with self._torch.inference_mode(), suppress(_Stop):
                return self._output.run(self._pipe, list(texts), self._device, length, self._arguments)

        values = self._errors.run(encoded, f"{len(texts)} captions")
        full = self._recipe.length
        seen = self._seen[: len(texts)]
        return values, seen if len(seen) == len(texts) else [_Length(full, full, 0)] * len(texts)

    def _measured(self, texts: Sequence[str]) -> list[_Length]:
        """Measure each text by its tokens; the text encoders stop before they run."""
        with ExitStack() as hooks:
            for part in self._output.parts:
                hooks.enter_context(getattr(self._pipe, part).register_forward_pre_hook(_stop))
            return self._run(list(texts), self._recipe.length)[1]

    def _stored(self, values: Any) -> list[NDArray[Any]]:
        """The arrays of a tensor, or of a list of tensors, in the storage type."""
        if isinstance(values, list):
            return [self._stored(value[None])[0] for value in values]
        kept = values.float().to(getattr(self._torch, self._recipe.storage_dtype)).contiguous().cpu()
        bits = kept.view(self._torch.uint16) if kept.dtype == self._torch.bfloat16 else kept
        return list(bits.numpy())

    def _model(self, part: Part, cls: Any) -> Any:
        """Load the text encoder of a part."""
        model, loading = cls.from_pretrained(
            part.folder,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            dtype=getattr(self._torch, self._recipe.compute_dtype),
            device_map=str(self._device),
        )
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(f"{part.name} lacks {len(missing)} tensors; the first is {missing[0]}")
        return model

    def _note(
        self, part: str, texts: Sequence[str], result: Any, tokenize: Callable[..., Any], is_padded: bool
    ) -> None:
        """Keep the length of each text, and how much is cut."""
        for text, ids, mask in zip(texts, result["input_ids"], result["attention_mask"], strict=True):
            used = int(sum(mask))
            whole = len(tokenize(text)["input_ids"]) if used == len(ids) else used
            self._seen.append(_Length(used, len(ids), max(whole - used, 0)))


def _watched(tokenizer: Any, note: Callable[..., None]) -> Any:
    """Make a tokenizer tell ``note`` of each call that truncates."""
    base = type(tokenizer)

    def call(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        result = base.__call__(self, text, *args, **options)
        if options.get("truncation"):
            texts = [text] if isinstance(text, str) else text
            note(texts, result, partial(base.__call__, self), options.get("padding") == "max_length")
        return result

    tokenizer.__class__ = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})
    return tokenizer


def call_default(pipeline: str, name: str) -> Any:
    """Default of an argument of a pipeline's ``__call__``; for a worker, because it imports diffusers."""
    import diffusers

    return inspect.signature(getattr(diffusers, pipeline).__call__).parameters[name].default


# token ids


class IdsProducer(Producer):
    """Ids of captions; opened with the folder of a ``pipeline``, or the ``stub``."""

    noise = EXACT

    def __init__(self, producer: Mapping[str, Any], recipe: PromptIdsRecipe, context: ProducerContext) -> None:
        super().__init__(producer, recipe, context)
        self._opens = producer
        self._ids: Callable[[Sequence[str]], list[NDArray[np.int32]]] | None = None

    def open(self) -> None:
        """See :class:`Producer`."""
        self._ids = self._stub if "stub" in self._opens else _Tokenizers(self._opens, self.recipe).ids

    def encode(self, batch: Sequence[Prepared]) -> list[Made]:
        """See :class:`Producer`."""
        assert self._ids is not None
        return [Made(array=ids) for ids in self._ids(_texts(batch, self.recipe))]

    def _stub(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The length of each word."""
        (length,) = self.recipe.lengths
        ids = np.zeros((len(texts), 2, length), dtype=np.int32)
        for item, text in zip(ids, texts, strict=True):
            words = [len(word) for word in ["", *text.split()]][:length]
            item[:, : len(words)] = [words, [1] * len(words)]
        return list(ids)


class _Tokenizers(_Assembled):
    """The tokenizers of a pipeline, with text encoders without weights."""

    def __init__(self, producer: Mapping[str, Any], recipe: PromptIdsRecipe) -> None:
        pipeline = locate_pipeline(producer["pipeline"], "prompt_ids")
        super().__init__(pipeline, recipe)
        self._runs = tokenizing_runs(pipeline.cls)
        self._parts = [part.name for part in pipeline.parts]
        self._seen = dict[str, list[NDArray[np.int32]]]()
        self._pipe = self._open(pipeline)

    def ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """(2, tokens) of each text: ids and mask of all tokenizers."""
        import torch

        self._seen = {part: [] for part in self._parts}
        for run in self._runs:
            device = torch.device("cpu" if len(run.parts) == 1 else "meta")
            with ExitStack() as hooks, torch.inference_mode(), suppress(_Stop):
                last = getattr(self._pipe, run.parts[-1])
                hooks.enter_context(last.register_forward_pre_hook(_stop))
                run.run(self._pipe, list(texts), device, self._recipe.length, self._arguments)
        by_text = zip(*self._seen.values(), strict=True)
        return [np.concatenate(ids, axis=1) for ids in by_text]

    def lengths(self) -> list[int]:
        """Ids of each tokenizer, padding included."""
        self.ids([""])
        return [ids[0].shape[1] for ids in self._seen.values()]

    def _model(self, part: Part, cls: Any) -> Any:
        """Make the text encoder of a part without weights."""
        import torch

        with torch.device("meta"):
            return cls(cls.config_class.from_pretrained(part.folder, local_files_only=True))

    def _note(
        self, part: str, texts: Sequence[str], result: Any, tokenize: Callable[..., Any], is_padded: bool
    ) -> None:
        """Keep ids and mask of each text."""
        if not is_padded:
            full = self._recipe.length + self._output.drop
            result = tokenize(list(texts), padding="max_length", truncation=True, max_length=full)
        both = np.stack([np.asarray(result[name]) for name in ("input_ids", "attention_mask")], axis=1)
        self._seen[part] += list(both.astype(np.int32))


def lengths(producer: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[int]:
    """Ids of each tokenizer, padding included; for a worker, because it imports diffusers."""
    return _Tokenizers(producer, PromptIdsRecipe.from_json(recipe)).lengths()
