"""Describe a tokenizer: its recipe, and what workers open it with; and turn its ids back to text.

If neither settings nor cache say otherwise, a text begins as the tokenizer itself begins it, and ends with its end
token. A template that asks for the date gets the fallback of Llama 3.1's template. No code of a model repository is
run. Cost: a second for 128 000 entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from latentcache.encoders.devices import installed
from latentcache.encoders.files import Wanted, find, is_stub, recorded_name, stub_delay
from latentcache.encoders.text.producer import stub_recipe
from latentcache.errors import UnsupportedModelError, UsageError
from latentcache.fields.input_ids import InputIdsRecipe, InputIdsSettings
from latentcache.fields.protocol import DescribeContext, Described
from latentcache.fields.settings import followed
from latentcache.fields.tokenizer import (
    CLOCK,
    LoadedTokenizer,
    pin_clock,
    read_template,
    read_tokenizer,
    template_hash,
    token_ids,
    tokenizer_fingerprint,
    tokenizer_parts,
)

_DEFAULT_DAY = date(2024, 7, 26)
_LIBRARIES = ("transformers", "tokenizers", "numpy", "pyarrow")
_DECODERS = ("tokenizers",)
_WANTED = Wanted(
    argument="tokenizer",
    takes="a folder, a tokenizer.json, a hub id, or stub",
    files=("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
           "*.model", "config.json"),
)  # fmt: skip
#: ``Record.form`` of a conversation, and of a text that begins with a prompt.
_CHAT, _PROMPT = 1, 2
#: Names of the stub's ids above the bytes.
_STUB = {256: "<bos>", 257: "<eos>", 258: "<pad>", 259: "<turn>", 260: "<end>"}
Pieces = list[tuple[str, bool]]
"""Texts, each with True if it is a special token."""


def describe(settings: InputIdsSettings, context: DescribeContext) -> Described:
    """Describe token ids. Settings that were not given follow the cache."""
    before = context.recipe if isinstance(context.recipe, InputIdsRecipe) else None
    requested = settings
    provenance = context.provenance
    settings = _completed(requested, before, provenance, check=context.check)
    tokenizer = settings.tokenizer or ""
    template = settings.chat_template
    if context.samples is None:
        forms = None
        chat = bool(before.chat_template if before else requested.chat_template or requested.template_options)
    else:
        forms = context.samples.columns.get("form", np.zeros(0))
        chat = bool((forms == _CHAT).any())
    if not chat:
        _check_unused(requested)
    if settings.loss is None and forms is not None and (forms == _PROMPT).any():
        settings = replace(settings, loss="assistant")
    offline = context.check and requested.tokenizer is None
    described = describe_tokenizer(settings, provenance, chat=chat, offline=offline)
    assert isinstance(described.recipe, InputIdsRecipe)
    if forms is not None and not (chat and (forms == _CHAT).all()):
        _check_ends(described.recipe, tokenizer)
    files = {"tokenizer": tokenizer, "chat_template": None if template is None else str(template.resolve())}
    libraries = {"libraries": installed(_LIBRARIES), "decoders": installed(_DECODERS)}
    return replace(described, provenance={**described.provenance, **files, **libraries})


def describe_tokenizer(
    settings: InputIdsSettings,
    cached: Mapping[str, Any] = MappingProxyType({}),
    *,
    chat: bool = False,
    offline: bool = False,
) -> Described:
    """Describe the tokenizer that settings name; ``cached`` and ``offline`` as of ``files.find``.

    Its ``producer`` has the text of ``tokenizer.json`` rather than its path, so every worker uses the bytes that were
    fingerprinted.
    """
    name, loss = settings.tokenizer or "", settings.loss or ("assistant" if chat else "all")
    add_eos = settings.add_eos is not False
    if is_stub(name):
        _check_unused(settings, "the stub tokenizer has its own turns")
        producer: dict[str, Any] = {"tokenizer": "", "delay_ms": stub_delay(name, "tokenizer")}
        stub = stub_recipe(chat=chat, loss=loss, add_bos=bool(settings.add_bos), add_eos=add_eos)
        return Described(recipe=stub, label=name, producer=producer, provenance={"revision": "", "parts": {}})
    path, commit = find(name, _WANTED, cached, offline=offline)
    loaded = read_tokenizer(path)
    template, options = _pinned(loaded, settings) if chat else ("", ())
    text = json.dumps(loaded.json, ensure_ascii=False)
    parts = tokenizer_parts(loaded.json, loaded.special)
    begins = _begins_with_bos(text, name, loaded)
    recipe = InputIdsRecipe(
        tokenizer=tokenizer_fingerprint(parts),
        num_ids=1 + max(token_ids(loaded.json).values()),
        chat_template=template_hash(template),
        template_options=options,
        loss=loss,
        add_bos=begins if settings.add_bos is None else settings.add_bos,
        add_eos=add_eos,
        bos_id=loaded.id_of("bos_token"),
        eos_id=loaded.id_of("eos_token"),
        pad_id=loaded.id_of("pad_token"),
        split_control=not settings.control_tokens,
    )
    special = [list(pair) for pair in sorted(loaded.special.items())]
    return Described(
        recipe=recipe,
        label=name,
        producer={"tokenizer": text, "chat_template": template, "special": special},
        provenance={"revision": commit, "parts": parts},
        notes=loaded.notes,
    )


def decoder(recipe: InputIdsRecipe, provenance: Mapping[str, Any]) -> Callable[[Sequence[int]], Pieces]:
    """Return a function from ids to pieces of text, by the tokenizer that the cache records; nothing is downloaded.

    Raises:
        LatentcacheError: The tokenizer is not here, or it is not the one that made the ids.
    """
    name = str(provenance.get("tokenizer", ""))
    if is_stub(name):
        return lambda ids: _pieces(ids, _STUB, lambda text: bytes(text).decode("utf-8", "replace"))
    context = DescribeContext(recipe=recipe, provenance=provenance, check=True)
    described = describe(InputIdsSettings(), context)
    if not isinstance(described.recipe, InputIdsRecipe) or described.recipe.tokenizer != recipe.tokenizer:
        raise UnsupportedModelError(
            f"the tokenizer {name} is not the one that made these ids",
            where=name,
            fix="build the cache again with it",
        )
    from tokenizers import Tokenizer

    opened: Any = Tokenizer.from_str(described.producer["tokenizer"])
    special = {number: token.content for number, token in opened.get_added_tokens_decoder().items() if token.special}
    return lambda ids: _pieces(ids, special, lambda text: str(opened.decode(text, skip_special_tokens=False)))


def _pieces(ids: Sequence[int], special: Mapping[int, str], decode: Callable[[list[int]], str]) -> Pieces:
    """Split ids into special tokens and the text between them."""
    pieces = Pieces()
    for is_special, group in groupby(map(int, ids), key=lambda number: number in special):
        run = list(group)
        pieces += [(special[number], True) for number in run] if is_special else [(decode(run), False)]
    return pieces


def _check_ends(recipe: InputIdsRecipe, tokenizer: str) -> None:
    """Check that the tokenizer has the tokens that texts begin and end with; conversations need none."""
    ends = (("bos", recipe.add_bos, recipe.bos_id), ("eos", recipe.add_eos, recipe.eos_id))
    for end, is_added, token in ends:
        if is_added and token is None:
            by_name = "or name the token in its tokenizer_config.json"
            raise UsageError(
                f"the tokenizer {tokenizer} has no {end}_token, and texts need one",
                where=tokenizer,
                fix=f"use --no-add-{end}, {by_name}",
            )


def _completed(
    settings: InputIdsSettings, before: InputIdsRecipe | None, provenance: Mapping[str, Any], *, check: bool
) -> InputIdsSettings:
    """Fill settings that were not given with those of the cache.

    Template and begin of texts follow the cache for its own tokenizer alone, and in a check always.
    """
    recorded = provenance.get("tokenizer")
    if settings.tokenizer is None and recorded is None:
        raise UsageError(
            "no tokenizer was given",
            why="token ids need one, and the cache names none",
            fix="--tokenizer=PATH: a tokenizer.json, or a folder with one (stub: bytes, to try things)",
            slug="tokenizer-missing",
        )
    same = check or settings.tokenizer in (None, recorded)
    template = Path(provenance["chat_template"]) if provenance.get("chat_template") and same else None
    settings = followed(settings, tokenizer=recorded, chat_template=template)
    if not is_stub(str(settings.tokenizer)):
        settings = replace(settings, tokenizer=recorded_name(str(settings.tokenizer)))
    if before is not None:
        # A cache of texts alone carries loss everywhere; that is no choice for conversations that come later.
        loss = before.loss if before.chat_template or before.loss != "all" else None
        settings = followed(settings, loss=loss, add_eos=before.add_eos, control_tokens=not before.split_control)
    if before is not None and same:
        settings = followed(settings, add_bos=before.add_bos, template_options=before.template_options)
    return settings


def _check_unused(settings: InputIdsSettings, problem: str = "DATA has no conversations") -> None:
    """Reject settings of conversations that nothing would use."""
    for name in ("chat_template", "template_options"):
        if getattr(settings, name):
            raise UsageError(problem, argument=name, why="no template writes its texts", fix="leave it out")


def _pinned(loaded: LoadedTokenizer, settings: InputIdsSettings) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The template with a fixed date, and its options as sorted JSON."""
    template = read_template(settings.chat_template) if settings.chat_template else loaded.chat_template
    if not template:
        raise UsageError(
            f"the tokenizer {settings.tokenizer} has no chat template, and the data has conversations",
            why="only a template defines how turns are written",
            fix="give one with --chat-template=FILE",
        )
    options = dict(settings.template_options or ())
    if CLOCK in template:
        options.setdefault(CLOCK, json.dumps(_DEFAULT_DAY.isoformat()))
        try:
            template = pin_clock(template, options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{CLOCK}: not a date", why=str(error), fix="write it as 2024-07-26") from error
    return template, tuple(sorted(options.items()))


def _begins_with_bos(text: str, name: str, loaded: LoadedTokenizer) -> bool:
    """True if the tokenizer begins a text with its begin token when its library opens it."""
    from tokenizers import Tokenizer

    try:
        opened = Tokenizer.from_str(text)
    except Exception as error:
        raise UnsupportedModelError(
            f"the tokenizer {name} cannot be loaded",
            where=name,
            why=str(error),
            fix="`pip install -U tokenizers`, or save it again with save_pretrained",
        ) from error
    bos = loaded.id_of("bos_token")
    configured = loaded.config.get("add_bos_token")
    return bos is not None and (configured if isinstance(configured, bool) else opened.encode("a").ids[:1] == [bos])
