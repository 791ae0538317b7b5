"""From the name of a tokenizer and settings to the description that every worker is made of, and to the recipe.

The recipe has fingerprint, template, ends of texts and the width of ids. If a setting is not given and the cache has
none: texts begin with the token that the tokenizer itself begins texts with, and end with its end token; the date
that a template asks for is the fallback of Llama 3.1's template. Cost: a second for 128 000 entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.encoders.hub import is_hub_id
from latentcache.encoders.stubs import is_stub, stub_delay
from latentcache.encoders.text.locate import load_tokenizer
from latentcache.encoders.text.protocol import TokenizerDescription
from latentcache.encoders.text.stub import stub_description
from latentcache.encoders.versions import installed
from latentcache.errors import UnsupportedModelError, UsageError
from latentcache.fields.input_ids import LOSSES, InputIdsRecipe, InputIdsSettings
from latentcache.fields.protocol import Cached, DescribeContext, Described
from latentcache.identity.content import content_hash
from latentcache.identity.template import CLOCK, pin_clock
from latentcache.identity.tokenizer import tokenizer_fingerprint, tokenizer_parts
from latentcache.identity.tokenizer_files import LoadedTokenizer, read_template, token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DEFAULT_DAY = date(2024, 7, 26)
_LIBRARIES = ("transformers", "tokenizers", "tiktoken", "numpy", "pyarrow")
_DECODERS = ("tokenizers",)
_FILES = {"--tokenizer PATH": "tokenizer", "--chat-template FILE": "chat template"}
#: ``Record.form`` of a conversation, and of a text that begins with a prompt.
CHAT, PROMPT = 1, 2


def describe(settings: InputIdsSettings, cached: Cached, context: DescribeContext) -> Described:
    """The recipe that settings, tokenizer and cache give. Settings that were not given follow the cache.

    Raises:
        UsageError: No tokenizer is known, conversations without a template, or texts whose ends the tokenizer lacks.
        EncoderError: The tokenizer cannot be used.
    """
    before = cached.recipe if isinstance(cached.recipe, InputIdsRecipe) else None
    made, given = cached.provenance, settings
    settings = _completed(settings, before, made)
    word = settings.tokenizer or ""
    what, flag, path = _gone(given, settings, made)
    if context.check and not context.check_encoder and before is not None and what:
        note = f"{what}: {path}; name it with {flag}"
        return Described(recipe=_changed(before, settings), label=word, provenance=made, notes=(note,))
    if what == "gone":
        why = (
            "--reencode tokenizes records again" if context.check else "settings that are not given follow the cache"
        )
        raise UsageError(f"the {_FILES[flag]} of this cache is gone: {path}", why=why, fix=f"add {flag}")
    forms = _forms(before, context)
    if CHAT not in forms:
        _check_unused(given)
    description = describe_tokenizer(
        word,
        chat=CHAT in forms,
        chat_template=settings.chat_template,
        template_options={name: json.loads(value) for name, value in settings.template_options or ()},
        loss=settings.loss or ("assistant" if PROMPT in forms else None),
        add_bos=settings.add_bos,
        add_eos=settings.add_eos is not False,
        split_control=not settings.control_tokens,
        revision=str(made.get("revision", "")) if word == made.get("tokenizer") else "",
    )
    template = settings.chat_template
    provenance = {
        "tokenizer": word,
        "chat_template": None if template is None else str(template.resolve()),
        "revision": description.revision,
        "parts": dict(description.parts),
        "libraries": installed(_LIBRARIES),
        "decoders": installed(_DECODERS),
    }
    producer = {"tokenizer": description.as_json()}
    notes = description.notes
    return Described(recipe=description.recipe, label=word, producer=producer, provenance=provenance, notes=notes)


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
    revision: str = "",
) -> TokenizerDescription:
    """Describe a tokenizer.

    Args:
        tokenizer: Folder, ``tokenizer.json``, hub id, or ``stub`` (``stub:delay_ms=N``).
        chat: True if there are conversations: then a template is needed and becomes part of the recipe.
        chat_template: File with a template, in place of the tokenizer's own.
        template_options: Values that the template gets beside the conversation, JSON values; ``strftime_now``
            (``YYYY-MM-DD``) is the date for templates that ask for it.
        loss: ``assistant`` or ``all`` [default: ``assistant`` for conversations, ``all`` for texts].
        add_bos: True: a text begins with the begin token [default: as the tokenizer itself does].
        add_eos: True: a text ends with the end token.
        split_control: True: special-token text in content stays text.
        revision: Commit of a hub id that an earlier build used.

    Raises:
        ModelNotFoundError: No such tokenizer or template.
        UnsupportedModelError: It cannot be used, with the reason.
        UsageError: An unknown loss, conversations without a template, an option that is not JSON.
    """
    if loss is not None and loss not in LOSSES:
        raise UsageError(f"--loss {loss!r}: not a known value", fix=f"use --loss {' or '.join(LOSSES)}")
    if is_stub(tokenizer):
        if chat_template is not None or template_options:
            flag = "--chat-template" if chat_template is not None else "--template-option"
            what = f"{flag}: the stub tokenizer has its own turns"
            raise UsageError(what, fix=f"leave {flag} out, or give a real --tokenizer")
        delay = stub_delay(tokenizer, "--tokenizer")
        return stub_description(chat=chat, loss=loss, add_bos=bool(add_bos), add_eos=add_eos, delay_ms=delay)
    loaded, commit = load_tokenizer(tokenizer, revision=revision)
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
        revision=commit,
    )


def check_ends(recipe: InputIdsRecipe, word: str) -> None:
    """Check that the tokenizer has the tokens that texts begin and end with; conversations need none.

    Raises:
        UsageError: One is wanted and missing.
    """
    for name, wanted, found in (("bos", recipe.add_bos, recipe.bos_id), ("eos", recipe.add_eos, recipe.eos_id)):
        if wanted and found is None:
            raise UsageError(
                f"the tokenizer {word} has no {name}_token, and texts need one",
                where=word,
                fix=f"use --no-add-{name}, or name the token in its tokenizer_config.json",
            )


def _completed(
    settings: InputIdsSettings, before: InputIdsRecipe | None, made: Mapping[str, Any]
) -> InputIdsSettings:
    """The settings, with those of the cache in place of settings that were not given."""
    recorded = made.get("tokenizer")
    if settings.tokenizer is None and recorded is None:
        raise UsageError(
            "no tokenizer was given",
            why="token ids need one, and the cache names none",
            fix="--tokenizer PATH: a tokenizer.json, or a folder with one (stub: bytes, for trying things)",
        )
    same = settings.tokenizer in (None, recorded)
    template = Path(made["chat_template"]) if made.get("chat_template") and same else None
    given = replace(
        settings,
        tokenizer=_absolute(settings.tokenizer or str(recorded)),
        chat_template=settings.chat_template or template,
    )
    if before is None:
        return given
    return replace(
        given,
        # A cache of texts alone carries loss everywhere; that is no choice for conversations that come later.
        loss=given.loss or (before.loss if before.chat_template or before.loss != "all" else None),
        add_bos=before.add_bos if given.add_bos is None and same else given.add_bos,
        template_options=given.template_options or (before.template_options if same else None),
        add_eos=before.add_eos if given.add_eos is None else given.add_eos,
        control_tokens=not before.split_control if given.control_tokens is None else given.control_tokens,
    )


def _changed(recipe: InputIdsRecipe, settings: InputIdsSettings) -> InputIdsRecipe:
    """The recipe of a cache with complete settings, without its tokenizer."""
    return replace(
        recipe,
        loss=settings.loss or recipe.loss,
        add_bos=bool(settings.add_bos),
        add_eos=settings.add_eos is not False,
        template_options=settings.template_options or recipe.template_options,
        split_control=not settings.control_tokens,
    )


def _forms(before: InputIdsRecipe | None, context: DescribeContext) -> set[int]:
    """Forms of the records (``Record.form``) that matter here; without data the cache tells."""
    if context.samples is None:
        return {CHAT} if before is not None and before.chat_template else set()
    found = context.samples.columns.get("form")
    return {form for form in (CHAT, PROMPT) if found is not None and bool((found == form).any())}


def _gone(given: InputIdsSettings, settings: InputIdsSettings, made: Mapping[str, Any]) -> tuple[str, str, str]:
    """What became of a recorded file that the settings follow, the option that names it, and its place.

    Empty words if it is there. A hub id is never looked up for a check.
    """
    word, template = settings.tokenizer or "", settings.chat_template
    if word == made.get("tokenizer") and not is_stub(word) and not Path(word).exists():
        is_path = Path(word).is_absolute() or not is_hub_id(word)
        return "gone" if is_path else "not looked up", "--tokenizer PATH", word
    if given.chat_template is None and template is not None and not template.exists():
        return "gone", "--chat-template FILE", str(template)
    return "", "", ""


def _check_unused(given: InputIdsSettings) -> None:
    """Reject settings of conversations for data without any."""
    flag = "--chat-template" if given.chat_template else "--template-option" if given.template_options else ""
    if flag:
        why = "texts are not written by a template"
        raise UsageError(f"{flag}: DATA has no conversations", why=why, fix=f"leave {flag} out, or check DATA")


def _absolute(tokenizer: str) -> str:
    """A path as an absolute one, any other word unchanged."""
    path = Path(tokenizer)
    return str(path.resolve()) if not is_stub(tokenizer) and path.exists() else tokenizer


def _recipe_of(loaded: LoadedTokenizer, parts: Mapping[str, str], *, begins: bool) -> InputIdsRecipe:
    """The part of a recipe that follows from the tokenizer."""
    return InputIdsRecipe(
        tokenizer=tokenizer_fingerprint(parts),
        num_ids=1 + max(token_ids(loaded.json).values()),
        add_bos=begins,
        bos_id=loaded.id_of("bos_token"),
        eos_id=loaded.id_of("eos_token"),
        pad_id=loaded.id_of("pad_token"),
    )


def _template(loaded: LoadedTokenizer, given: Path | None, word: str) -> str:
    template = read_template(given) if given else loaded.chat_template
    if not template:
        raise UsageError(
            f"the tokenizer {word} has no chat template, and the data has conversations",
            where=word,
            why="only a template defines how turns are written",
            fix="give one with --chat-template FILE",
        )
    return template


def _pinned(template: str, options: dict[str, object]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The template with a fixed date, and its options as sorted JSON."""
    if CLOCK in template:
        options.setdefault(CLOCK, _DEFAULT_DAY.isoformat())
        try:
            day = date.fromisoformat(str(options[CLOCK]))
        except ValueError as error:
            raise UsageError(f"{CLOCK}: not a date", why=str(error), fix="write it as 2024-07-26") from error
        template = pin_clock(template, day)
    try:
        spelled = {name: json.dumps(value, sort_keys=True, allow_nan=False) for name, value in options.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(
            "--template-option: not a JSON value", why=str(error), fix="give text, numbers, lists, true"
        ) from error
    return template, tuple(sorted(spelled.items()))


def _opened(text: str, word: str) -> Tokenizer:
    """The tokenizer, opened by its library."""
    from tokenizers import Tokenizer

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
    configured = loaded.config.get("add_bos_token")
    if isinstance(configured, bool):
        return configured and bos is not None
    ids: Sequence[int] = opened.encode("a").ids
    return bos is not None and ids[:1] == [bos]
