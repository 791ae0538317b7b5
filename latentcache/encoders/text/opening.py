"""From the description of a tokeniser to one that works, in whatever process needs it.

Guarantee: the stub opens without any tokenizer library, and tiktoken is imported only where the fast path was found
to be right. Rust threads of the tokenizer are off unless asked for: workers are processes, and threads of a library
do not survive a fork.
"""

from __future__ import annotations

import os

from latentcache.encoders.stub_tokeniser import StubTokeniser
from latentcache.encoders.tokenising import Tokeniser, TokeniserDescription


def open_tokeniser(description: TokeniserDescription, *, threads: bool = False) -> Tokeniser:
    """A tokeniser that follows the description.

    Args:
        description: From ``describe_tokens`` or ``stub_tokeniser``.
        threads: Whether the tokenizer may use a thread on each core; for a process that never forks afterwards.
            It is the process's setting (``TOKENIZERS_PARALLELISM``), so the latest call counts.

    Raises:
        UnsupportedModelError: Control tokens cannot be told from text in this tokenizer.
        UsageError: The chat template is no Jinja.
    """
    if not description.tokenizer:
        return StubTokeniser(description)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads else "false"
    # Only what is needed: chat templates and tokenizers cost a second, tiktoken is an extra.
    from latentcache.encoders.text_tokeniser import TextTokeniser, engine_parts

    parts = engine_parts(description)
    if not description.fast:
        return TextTokeniser(description, parts)
    from latentcache.encoders.bpe import FastEngine, byte_ranks

    ranks = byte_ranks(parts.tokenizer, proven=True)  # by ``open_both``, before ``fast`` was said
    fast = None if isinstance(ranks, str) else FastEngine(ranks, description.recipe.dtype)
    return TextTokeniser(description, parts, fast)


def open_both(description: TokeniserDescription) -> tuple[Tokeniser, Tokeniser] | str:
    """The tokeniser by the reference and by the fast engine, to be compared; or why there is no fast one.

    Errors as :func:`open_tokeniser`.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # tiktoken is an extra.
    try:
        from latentcache.encoders.bpe import FastEngine, byte_ranks
    except ModuleNotFoundError as error:
        if error.name != "tiktoken":
            raise
        return "tiktoken is not installed; `pip install 'latentcache[tokens]'`"
    from latentcache.encoders.text_tokeniser import TextTokeniser, engine_parts

    parts = engine_parts(description)
    ranks = byte_ranks(parts.tokenizer)
    if isinstance(ranks, str):
        return ranks
    reference = TextTokeniser(description, parts)
    return reference, reference.beside(FastEngine(ranks, description.recipe.dtype))
