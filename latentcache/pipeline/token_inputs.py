"""From the settings of a build to its records and its tokeniser; what was not said follows the cache.

Decides nothing that a source or a tokenizer decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from latentcache.encoders.describe_tokens import describe_tokeniser
from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import UsageError
from latentcache.pipeline.before import begun, newest_whole
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.sources.corpus import RecordOptions, scan_records
from latentcache.sources.records import RecordScan
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import TOKENS, TOKENS_VERSION, signed
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.token_recipe import TokenRecipe

#: The share that is all records.
WHOLE = "0/1"
_STUB = re.compile(r"stub(?::delay_ms=([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBefore:
    """The cache as a build of tokens finds it."""

    generation: TokenGeneration | None = None
    recipe: TokenRecipe | None = None
    tokenizer: str | None = None
    """As the build before was told it, a path as an absolute one."""
    chat_template: str | None = None
    """Path of the template's file, where one was given."""
    share: str | None = None
    """Of the records, as ``i/n``; ``0/1`` for all of them, None where nothing is there."""
    damage: str = ""
    """What is wrong with the current generation, where an older one or none had to stand in for it."""


def read_token_before(layout: CacheLayout) -> TokenBefore:
    """What the cache holds already; a build that was killed counts with its recipe.

    Raises:
        CacheFormatError: Written by a newer version, or a cache of pictures.
    """
    generation, damage = newest_whole(layout, load_tokens)
    unfinished = begun(layout, TOKENS, _begun)
    if unfinished is not None:
        return replace(unfinished, generation=generation, damage=damage)
    if generation is None:
        return TokenBefore(damage=damage)
    made = generation.manifest["provenance"]
    return TokenBefore(
        generation=generation,
        recipe=generation.recipe,
        tokenizer=str(made["tokenizer"]),
        chat_template=made.get("chat_template"),
        share=generation.share or WHOLE,
        damage=damage,
    )


def token_marker(recipe: TokenRecipe, settings: TokenSettings, samples: int) -> dict[str, Any]:
    """What BUILDING holds while a build of tokens runs. ``settings`` are whole: nothing in them is unsaid."""
    template = settings.chat_template
    return signed(
        {
            "format": TOKENS_VERSION,
            "kind": TOKENS,
            "recipe": recipe.as_json(),
            "tokenizer": settings.tokenizer,
            "chat_template": None if template is None else str(template.resolve()),
            "share": str(settings.part or WHOLE),
            "samples": samples,
        }
    )


def completed(settings: TokenSettings, before: TokenBefore) -> TokenSettings:
    """The settings with what the cache says in the places of what was not said.

    Raises:
        UsageError: Nobody says which tokenizer, or another share is asked for than the cache holds.
    """
    _refuse_other_share(settings, before)
    recipe, same = before.recipe, settings.tokenizer in (None, before.tokenizer)
    if settings.tokenizer is None and before.tokenizer is None:
        raise UsageError(
            "no tokenizer was given",
            why=before.damage or "tokens are made by one, and nothing here says by which",
            fix="--tokenizer PATH: a tokenizer.json, or a folder with one (stub: bytes, for trying things)",
        )
    template = Path(before.chat_template) if before.chat_template and same else None
    said = replace(
        settings,
        tokenizer=_absolute(settings.tokenizer or before.tokenizer or ""),
        chat_template=settings.chat_template or template,
        share=settings.share or before.share,
    )
    if recipe is None:
        return said
    return replace(
        said,
        # Texts alone carry loss everywhere, so their recipe says nobody's choice for conversations that come later.
        loss=said.loss or (recipe.loss if recipe.chat_template or recipe.loss != "all" else None),
        add_bos=recipe.add_bos if said.add_bos is None and same else said.add_bos,
        template_options=said.template_options or recipe.template_options,
        add_eos=recipe.add_eos if said.add_eos is None else said.add_eos,
        control_tokens=not recipe.split_control if said.control_tokens is None else said.control_tokens,
    )


def _refuse_other_share(settings: TokenSettings, before: TokenBefore) -> None:
    """A folder holds one share: another one would take the place of what somebody still wants to put together."""
    asked = None if settings.share is None else str(settings.part or WHOLE)
    if before.share is None or asked in (None, before.share):
        return
    raise UsageError(
        f"this cache holds {told_share(before.share)} of its data, and {told_share(asked or WHOLE)} is asked for",
        where=str(settings.cache),
        why="the documents of one would replace those of the other",
        fix="give each share, and the whole, a folder of its own with --out",
    )


def told_share(share: str) -> str:
    """A share in words."""
    return "all records" if share == WHOLE else f"share {share}"


def describe(settings: TokenSettings, *, chat: bool) -> TokeniserDescription:
    """What the tokeniser of these settings is.

    Raises:
        EncoderError: The tokenizer cannot be used.
        UsageError: Conversations without a template, or texts whose ends the tokenizer does not know.
    """
    return describe_tokeniser(
        settings.tokenizer or "",
        chat=chat,
        chat_template=settings.chat_template,
        template_options={name: json.loads(value) for name, value in settings.template_options or ()},
        loss=settings.loss,
        add_bos=settings.add_bos,
        add_eos=settings.add_eos is not False,
        split_control=not settings.control_tokens,
    )


def open_records(settings: TokenSettings) -> RecordScan:
    """The records of DATA.

    Raises:
        SourceError: There is nothing that could be one.
        UsageError: A kind of file that is not read, or a data set that is not there.
    """
    options = RecordOptions(text_lines=settings.text_lines, datasets=settings.datasets, share=settings.part)
    return scan_records(settings.data, options)


def is_there(tokenizer: str) -> bool:
    """Whether a recorded tokenizer is still there to be asked."""
    return _STUB.fullmatch(tokenizer) is not None or Path(tokenizer).exists()


def _absolute(tokenizer: str) -> str:
    """A path as an absolute one, anything else as it was said."""
    path = Path(tokenizer)
    return str(path.resolve()) if path.exists() and _STUB.fullmatch(tokenizer) is None else tokenizer


def _begun(marker: Mapping[str, Any]) -> TokenBefore:
    """What a build that has not ended set out to do."""
    return TokenBefore(
        recipe=TokenRecipe.from_json(marker["recipe"]),
        tokenizer=str(marker["tokenizer"]),
        chat_template=marker["chat_template"],
        share=str(marker.get("share", WHOLE)),
    )
