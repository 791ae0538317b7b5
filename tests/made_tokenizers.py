"""Tokenizers trained on the docstrings of the standard library."""

import argparse
import asyncio
import collections
import functools
import inspect
import json
import logging
import pathlib
import subprocess

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
EXTRA = ["naïve café Straße 数据 テスト данные 123 4567 don't we'll I'VE  \n\n\t{}[]();:=!== -> //"] * 50


@functools.cache
def texts():
    modules = (argparse, asyncio, collections, inspect, json, logging, pathlib, subprocess)
    found = [inspect.getdoc(value) or "" for module in modules for value in vars(module).values() if callable(value)]
    return tuple([text for text in found if text] + EXTRA)


def byte_level(split=None, *, special=CHATML_TOKENS, first=True, nfc=False, vocab_size=600, **model):
    """Train byte-level BPE with GPT-2's split or a regex; special tokens first or last."""
    tokenizer = Tokenizer(models.BPE(**model))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [pre_tokenizers.Split(Regex(split), "isolated"), last] if split else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if steps else last
    tokenizer.decoder = decoders.ByteLevel()
    learned = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special) if first else [], **learned)
    tokenizer.train_from_iterator(texts(), trainer)
    if not first:
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def unigram(special=("<unk>", "<s>", "</s>")):
    """Train a Unigram tokenizer in the layout of converted SentencePiece models."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=list(special), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def save(tokenizer, folder, *, template=None, roles=None, bos_first=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    if bos_first:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_first} $A", special_tokens=[(bos_first, tokenizer.token_to_id(bos_first))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(roles or {}), **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder
