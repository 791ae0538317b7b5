"""Open a tokenizer from its description, in whatever process needs it.

Guarantee: the stub opens without any tokenizer library; no setting of the process is changed.
"""

from __future__ import annotations

from latentcache.encoders.text.protocol import RecordTokenizer, TokenizerDescription
from latentcache.encoders.text.stub import StubTokenizer


def open_tokenizer(description: TokenizerDescription) -> RecordTokenizer:
    """A tokenizer that follows the description.

    Raises:
        UnsupportedModelError: Special tokens are indistinguishable from text in this tokenizer.
        UsageError: The chat template is not valid Jinja.
    """
    if not description.tokenizer:
        return StubTokenizer(description)
    # Chat templates and tokenizers cost a second.
    from latentcache.encoders.text.tokenizer import TextTokenizer

    return TextTokenizer(description)
