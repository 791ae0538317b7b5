"""Describe tokenizers from a folder and settings."""

from latentcache.encoders.text.describe import describe_tokenizer
from latentcache.encoders.text.producer import open_tokenizer
from latentcache.fields.input_ids import InputIdsSettings


def described_tokenizer(folder, *, chat=False, **settings):
    return describe_tokenizer(InputIdsSettings(tokenizer=str(folder), **settings), chat=chat)


def opened_tokenizer(folder, **options):
    description = described_tokenizer(folder, **options)
    return open_tokenizer(description.producer, description.recipe)
