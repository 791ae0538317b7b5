"""Make token ids and attention masks of captions, as the tokenizers of a pipeline give them to its text encoders.

Guarantee: the ids are those that the class's own ``encode_prompt`` computes. It runs as for embeddings, with text
encoders that hold no weights: the last of each run stops it, others before pass tensors on without values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.prompt.describe import Part, Pipeline, locate_pipeline
from latentcache.encoders.prompt.pipelines import tokenizing_runs
from latentcache.encoders.prompt.producer import Stop, assembled, stop
from latentcache.fields.noise import EXACT
from latentcache.fields.prompt_embeds import PromptIdsRecipe
from latentcache.fields.protocol import Made, Prepared, Producer, ProducerContext


class IdsProducer(Producer):
    """Ids of captions; opened with the folder of a ``pipeline``, or the ``stub``."""

    noise = EXACT

    def __init__(self, producer: Mapping[str, Any], recipe: PromptIdsRecipe, context: ProducerContext) -> None:
        super().__init__(producer, recipe, context)
        self._about = producer
        self._ids: Callable[[Sequence[str]], list[NDArray[np.int32]]] | None = None

    def open(self) -> None:
        """See :class:`Producer`."""
        self._ids = self._stub if "stub" in self._about else _Tokenizers(self._about, self.recipe).ids

    def encode(self, batch: Sequence[Prepared]) -> list[Made]:
        """See :class:`Producer`."""
        assert self._ids is not None
        captions = [(str(item.value.inputs["caption"]["text"]), item.output.variant) for item in batch]
        texts = [self.recipe.text(caption, variant) for caption, variant in captions]
        return [Made(array=ids) for ids in self._ids(texts)]

    def _stub(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The length of each word."""
        (length,) = self.recipe.lengths
        ids = np.zeros((len(texts), 2, length), dtype=np.int32)
        for item, text in zip(ids, texts, strict=True):
            words = [len(word) for word in ["", *text.split()]][:length]
            item[:, : len(words)] = [words, [1] * len(words)]
        return list(ids)


class _Tokenizers:
    """The tokenizers of a pipeline, and its class with text encoders without weights."""

    def __init__(self, producer: Mapping[str, Any], recipe: PromptIdsRecipe) -> None:
        pipeline = locate_pipeline(producer["pipeline"], "prompt_ids")
        self._runs, self._parts = tokenizing_runs(pipeline.cls), [part.name for part in pipeline.parts]
        self._length, self._full = recipe.length, recipe.length + pipeline.output.drop
        self._arguments = {name: json.loads(value) for name, value in recipe.arguments if not name.startswith("has ")}
        self._seen = dict[str, list[NDArray[np.int32]]]()
        self._pipe = self._opened(pipeline)

    def ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """(2, tokens) of each text: ids and mask of all tokenizers."""
        import torch

        self._seen = {part: [] for part in self._parts}
        for run in self._runs:
            device = torch.device("cpu" if len(run.parts) == 1 else "meta")
            with ExitStack() as hooks, torch.inference_mode(), suppress(Stop):
                last = getattr(self._pipe, run.parts[-1])
                hooks.enter_context(last.register_forward_pre_hook(stop))
                run.run(self._pipe, list(texts), device, self._length, self._arguments)
        each = zip(*self._seen.values(), strict=True)
        return [np.concatenate(items, axis=1) for items in each]

    def lengths(self) -> list[int]:
        """Ids of each tokenizer, padding included."""
        self.ids([""])
        return [ids[0].shape[1] for ids in self._seen.values()]

    def _opened(self, pipeline: Pipeline) -> Any:
        import torch
        import transformers

        def model_of(part: Part) -> Any:
            cls = getattr(transformers, part.cls)
            with torch.device("meta"):
                return cls(cls.config_class.from_pretrained(part.folder, local_files_only=True))

        return assembled(pipeline, model_of, self._note)

    def _note(
        self, part: str, texts: Sequence[str], result: Any, tokenize: Callable[..., Any], is_padded: bool
    ) -> None:
        """Keep ids and mask of each text."""
        if not is_padded:
            result = tokenize(list(texts), padding="max_length", truncation=True, max_length=self._full)
        both = np.stack([np.asarray(result[name]) for name in ("input_ids", "attention_mask")], axis=1)
        self._seen[part] += list(both.astype(np.int32))


def lengths(producer: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[int]:
    """Ids of each tokenizer, padding included; for a worker, because it imports diffusers."""
    return _Tokenizers(producer, PromptIdsRecipe.from_json(recipe)).lengths()
