"""The description of a tokenizer from its folder and settings."""

from latentcache.encoders.text.describe import describe_tokenizer
from latentcache.fields.input_ids import InputIdsSettings


def described_tokenizer(folder, *, chat=False, **settings):
    return describe_tokenizer(InputIdsSettings(tokenizer=str(folder), **settings), chat=chat)
