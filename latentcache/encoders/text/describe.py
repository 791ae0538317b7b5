"""From what a user calls a tokenizer, and settings, to the frozen description that every worker is made of.

Decides the recipe: fingerprint, template, ends of texts, and the width of ids. Where a setting is not given, texts
begin with the token that the tokenizer itself begins texts with, and end with its end token; the day that a
template asks for is the one that Llama 3.1's template falls back on. Cost: a second for 128 000 entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from tokenizers import Tokenizer

from latentcache.encoders.vae.builtin import stub_description
from latentcache.encoders.text.protocol import TokenizerDescription
from latentcache.encoders.tokenizer import load_tokenizer
from latentcache.errors import UnsupportedModelError, UsageError
from latentcache.identity.content import content_hash
from latentcache.identity.template import CLOCK, pin_clock
from latentcache.identity.tokenizer import tokenizer_fingerprint, tokenizer_parts
from latentcache.identity.tokenizer_files import LoadedTokenizer, read_template, token_ids
from latentcache.fields.input_ids import LOSSES, TokenRecipe

_DEFAULT_DAY = date(2024, 7, 26)


def describe_tokenizer(
    tokenizer: str,
    *,
    chat: bool,
    chat_template: Path | None = None,
    template_options: Mapping[str, object] | None = None,
    loss: str | None = None,
    add_bos: bool | None = None,
    add_eos: bool = True,
    split_control: bool = True,
) -> TokenizerDescription:
    """What a tokenizer makes of records; ``fastcheck.with_fast_path`` then says whether the fast path is right.

    Args:
        tokenizer: Folder, ``tokenizer.json``, hub id, or ``stub`` (``stub:delay_ms=N``).
        chat: Whether there are conversations: then a template is needed and becomes part of the recipe.
        chat_template: File with a template, in place of the tokenizer's own.
        template_options: What the template is given beside the conversation, JSON values;
            ``strftime_now`` (``YYYY-MM-DD``) is the day for templates that ask for it.
        loss: ``assistant`` or ``all``; by default ``assistant`` for conversations, ``all`` for texts.
        add_bos: Whether a text begins with the begin token; by default as the tokenizer itself does.
        add_eos: Whether a text ends with the end token.
        split_control: Whether control strings in what users wrote stay text.

    Raises:
        ModelNotFoundError: No such tokenizer or template.
        UnsupportedModelError: It cannot be used, with the reason.
        UsageError: A loss that is none, conversations without a template, an option that is no JSON.
    """
    if loss is not None and loss not in LOSSES:
        raise UsageError(f"there is no loss {loss!r}", fix=f"use --loss {' or '.join(LOSSES)}")
    if tokenizer == "stub" or tokenizer.startswith("stub:"):
        delay = tokenizer.partition("delay_ms=")[2] or "0"
        return stub_description(chat=chat, loss=loss, add_bos=bool(add_bos), add_eos=add_eos, delay_ms=int(delay))
    loaded = load_tokenizer(tokenizer)
    template = _template(loaded, chat_template, tokenizer) if chat else ""
    template, options = _pinned(template, dict(template_options or {}) if chat else {})
    text = json.dumps(loaded.json, ensure_ascii=False)
    opened = _opened(text, tokenizer)
    parts = tokenizer_parts(loaded.json, loaded.special)
    recipe = replace(
        _recipe_of(loaded, parts, begins=_begins_with(opened, loaded) if add_bos is None else add_bos),
        chat_template=content_hash(template.encode()).hex() if template else "",
        template_options=options,
        loss=loss or ("assistant" if chat else "all"),
        add_eos=add_eos,
        split_control=split_control,
    )
    if not chat:
        check_ends(recipe, tokenizer)
    return TokenizerDescription(
        recipe=recipe,
        tokenizer=text,
        chat_template=template,
        special=tuple(sorted(loaded.special.items())),
        parts=tuple(parts.items()),
        notes=loaded.notes,
    )


def _recipe_of(loaded: LoadedTokenizer, parts: Mapping[str, str], *, begins: bool) -> TokenRecipe:
    """What of a recipe the tokenizer itself says."""
    return TokenRecipe(
        tokenizer=tokenizer_fingerprint(parts),
        num_ids=1 + max(token_ids(loaded.json).values()),
        add_bos=begins,
        bos_id=loaded.id_of("bos_token"),
        eos_id=loaded.id_of("eos_token"),
        pad_id=loaded.id_of("pad_token"),
    )


def noted(description: TokenizerDescription, *, fast: bool, note: str) -> TokenizerDescription:
    """The description with a decision on the fast path and the sentence that says so."""
    return replace(description, fast=fast, notes=(*description.notes, note))


def _template(loaded: LoadedTokenizer, given: Path | None, word: str) -> str:
    template = read_template(given) if given else loaded.chat_template
    if not template:
        raise UsageError(
            f"the tokenizer {word} has no chat template, and the data are conversations",
            where=word,
            why="how turns are written is the template's matter and is never guessed",
            fix="give one with --chat-template FILE",
        )
    return template


def _pinned(template: str, options: dict[str, object]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The template with its clock stopped, and its options as sorted JSON."""
    if CLOCK in template:
        options.setdefault(CLOCK, _DEFAULT_DAY.isoformat())
        try:
            day = date.fromisoformat(str(options[CLOCK]))
        except ValueError as error:
            raise UsageError(f"{CLOCK} is no day", why=str(error), fix="write it as 2024-07-26") from error
        template = pin_clock(template, day)
    try:
        spelled = {name: json.dumps(value, sort_keys=True, allow_nan=False) for name, value in options.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(
            "a template option is no JSON", why=str(error), fix="give text, numbers, lists, true"
        ) from error
    return template, tuple(sorted(spelled.items()))


def _opened(text: str, word: str) -> Tokenizer:
    """What the library makes of it.

    Raises:
        UnsupportedModelError: It does not.
    """
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        raise UnsupportedModelError(
            f"the tokenizer {word} cannot be loaded",
            where=word,
            why=str(error),
            fix="`pip install -U tokenizers`, or save it again with save_pretrained",
        ) from error


def _begins_with(opened: Tokenizer, loaded: LoadedTokenizer) -> bool:
    """True if the tokenizer itself begins a text with its begin token."""
    bos = loaded.id_of("bos_token")
    said = loaded.config.get("add_bos_token")
    if isinstance(said, bool):
        return said and bos is not None
    ids: Sequence[int] = opened.encode("a").ids
    return bos is not None and ids[:1] == [bos]


def check_ends(recipe: TokenRecipe, word: str) -> None:
    """Check that the tokenizer has the tokens that texts begin and end with; conversations need none.

    Args:
        recipe: Of data with texts in them.
        word: What the user calls the tokenizer.

    Raises:
        UsageError: One is wanted and not there.
    """
    for name, wanted, found in (("bos", recipe.add_bos, recipe.bos_id), ("eos", recipe.add_eos, recipe.eos_id)):
        if wanted and found is None:
            raise UsageError(
                f"the tokenizer {word} has no {name}_token, and texts shall have one",
                where=word,
                fix=f"use --no-add-{name}, or name the token in its tokenizer_config.json",
            )
