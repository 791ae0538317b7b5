"""Tokenize records in a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latentcache.encoders.text.protocol import RecordTokenizer, TokenizerDescription
from latentcache.encoders.text.stub import StubTokenizer
from latentcache.fields.input_ids import InputIdsRecipe
from latentcache.fields.protocol import Failure, Finished, Job, Made, Prepared, Producer, ProducerContext, Read
from latentcache.sources.records import Record, record_from_json, record_size

#: Text of one worker that is worth a trial of the fast engine: the trial costs 2 s of processor time, which 6 MB of
#: text save again.
FAST_CHARACTERS = 8 << 20


def open_tokenizer(description: TokenizerDescription) -> RecordTokenizer:
    """A tokenizer that follows the description; the stub needs no library.

    Raises:
        UnsupportedModelError: Special tokens are indistinguishable from text in this tokenizer.
        UsageError: The chat template is not valid Jinja.
    """
    if not description.tokenizer:
        return StubTokenizer(description)
    # Chat templates and tokenizers cost a second.
    from latentcache.encoders.text.tokenizer import TextTokenizer

    return TextTokenizer(description)


class TokenProducer(Producer):
    """Token ids of records.

    Args:
        producer: ``tokenizer``: ``TokenizerDescription.as_json()``.
        recipe: Of the cache.
        context: Of the worker; its ``cost`` decides whether the fast engine is tried.

    Raises:
        UnsupportedModelError: The tokenizer cannot be used.
        UsageError: The chat template is not valid Jinja.
    """

    def __init__(self, producer: Mapping[str, Any], recipe: InputIdsRecipe, context: ProducerContext) -> None:
        self._description = TokenizerDescription.from_json(producer["tokenizer"], recipe)
        self._tokenizer = open_tokenizer(self._description)
        self._warn = context.warn
        self._untried = bool(self._description.tokenizer) and context.cost >= FAST_CHARACTERS

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
        if self._untried:
            self._try_fast_engine(records)
        return [_not_empty(made) for made in self._tokenizer.tokenize(records)]

    def _try_fast_engine(self, records: Sequence[Record]) -> None:
        """Use the fast engine if it gives the same ids; otherwise warn with the reason."""
        from latentcache.encoders.text.fastcheck import fast_tokenizer
        from latentcache.encoders.text.tokenizer import TextTokenizer

        self._untried = False
        assert isinstance(self._tokenizer, TextTokenizer)
        found = fast_tokenizer(self._description, self._tokenizer, records)
        if isinstance(found, str):
            self._warn(found)
        else:
            self._tokenizer = found


def _not_empty(made: Made | Failure) -> Made | Failure:
    if isinstance(made, Failure) or len(made.array):
        return made
    hint = "remove the record, or let every text end with a token (--add-eos)"
    return Failure(reason="no-tokens", detail="the tokenizer gives no token for it", hint=hint)
