"""Tokenize records in a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from latentcache.encoders.text.stub import StubTokenizer
from latentcache.fields.input_ids import InputIdsRecipe
from latentcache.fields.protocol import Failure, Finished, Job, Made, Prepared, Producer, ProducerContext, Read
from latentcache.sources.records import Record, record_from_json, record_size

if TYPE_CHECKING:
    from latentcache.encoders.text.tokenizer import TextTokenizer

#: Text of one worker that is worth a trial of the fast engine: the trial costs 2 s of processor time, which 6 MB of
#: text save again.
FAST_CHARACTERS = 8 << 20


def open_tokenizer(about: Mapping[str, Any], recipe: InputIdsRecipe) -> StubTokenizer | TextTokenizer:
    """The tokenizer that ``describe_tokenizer`` described; the stub needs no library. Raises as TextTokenizer."""
    if not about["tokenizer"]:
        return StubTokenizer(recipe, about["delay_ms"])
    # Chat templates and tokenizers cost a second.
    from latentcache.encoders.text.tokenizer import TextTokenizer

    return TextTokenizer(about, recipe)


class TokenProducer(Producer):
    """Token ids of records; the ``cost`` of its context decides whether the fast engine is tried."""

    def __init__(self, producer: Mapping[str, Any], recipe: InputIdsRecipe, context: ProducerContext) -> None:
        self._tokenizer = open_tokenizer(producer, recipe)
        self._warn = context.warn
        self._untried = bool(producer["tokenizer"]) and context.cost >= FAST_CHARACTERS

    def prepare(self, job: Job) -> Read:
        """See :class:`Producer`."""
        record = record_from_json(job.inputs["record"])
        size = record_size(record)
        items = [Prepared(output=output, value=record, num_bytes=size) for output in job.outputs]
        return Read(content=record.content, items=items)

    def encode(self, batch: Sequence[Prepared]) -> Finished:
        """See :class:`Producer`."""
        return Finished(self._tokenize([item.value for item in batch]))

    def make(self, jobs: Sequence[Job]) -> list[Made | Failure]:
        """See :class:`Producer`."""
        return self._tokenize([record_from_json(job.inputs["record"], job.content) for job in jobs])

    def _tokenize(self, records: Sequence[Record]) -> list[Made | Failure]:
        if self._untried:  # use the fast engine if it gives the same ids
            from latentcache.encoders.text.fast import fast_tokenizer

            self._untried = False
            found = fast_tokenizer(cast("TextTokenizer", self._tokenizer), records)
            if isinstance(found, str):
                self._warn(found)
            else:
                self._tokenizer = found
        return [_not_empty(made) for made in self._tokenizer.tokenize(records)]


def _not_empty(made: Made | Failure) -> Made | Failure:
    if isinstance(made, Failure) or len(made.array):
        return made
    hint = "remove the record, or let every text end with a token (--add-eos)"
    return Failure(reason="no-tokens", detail="the tokenizer gives no token for it", hint=hint)
