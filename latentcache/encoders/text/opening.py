"""From the description of a tokenizer to one that works, in whatever process needs it.

Guarantee: the stub opens without any tokenizer library, and tiktoken is imported only where the fast path was found
to be right. Rust threads of the tokenizer are off unless asked for: workers are processes, and threads of a library
do not survive a fork.
"""

from __future__ import annotations

import os

from latentcache.encoders.vae.builtin import StubTokenizer
from latentcache.encoders.text.protocol import RecordTokenizer, TokenizerDescription


def open_tokenizer(description: TokenizerDescription, *, threads: bool = False) -> RecordTokenizer:
    """A tokenizer that follows the description.

    Args:
        description: From ``describe_tokens`` or ``stub``.
        threads: Whether the tokenizer may use a thread on each core; for a process that never forks afterwards.
            It is the process's setting (``TOKENIZERS_PARALLELISM``), so the latest call counts.

    Raises:
        UnsupportedModelError: Control tokens cannot be told from text in this tokenizer.
        UsageError: The chat template is no Jinja.
    """
    if not description.tokenizer:
        return StubTokenizer(description)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads else "false"
    # Only what is needed: chat templates and tokenizers cost a second, tiktoken is an extra.
    from latentcache.encoders.tokenizer import TextTokenizer, engine_parts

    parts = engine_parts(description)
    if not description.fast:
        return TextTokenizer(description, parts)
    from latentcache.encoders.text.bpe import FastEngine, byte_ranks

    ranks = byte_ranks(parts.tokenizer, proven=True)  # by ``open_both``, before ``fast`` was said
    fast = None if isinstance(ranks, str) else FastEngine(ranks, description.recipe.dtype)
    return TextTokenizer(description, parts, fast)


def open_both(description: TokenizerDescription) -> tuple[RecordTokenizer, RecordTokenizer] | str:
    """The tokenizer by the reference and by the fast engine, to be compared; or why there is no fast one.

    Errors as :func:`open_tokenizer`.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # tiktoken is an extra.
    try:
        from latentcache.encoders.text.bpe import FastEngine, byte_ranks
    except ModuleNotFoundError as error:
        if error.name != "tiktoken":
            raise
        return "tiktoken is not installed; `pip install 'latentcache[tokens]'`"
    from latentcache.encoders.tokenizer import TextTokenizer, engine_parts

    parts = engine_parts(description)
    ranks = byte_ranks(parts.tokenizer)
    if isinstance(ranks, str):
        return ranks
    reference = TextTokenizer(description, parts)
    return reference, reference.beside(FastEngine(ranks, description.recipe.dtype))
