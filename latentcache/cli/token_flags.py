"""The flags of token builds, and which of the two kinds of build a command line asks for.

Decides nothing else: a build of tokens is asked for by one of these flags, by a cache of tokens, or by DATA that is
a file of records. Flags of the other kind are refused, never ignored.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from latentcache.errors import UsageError
from latentcache.pipeline.token_settings import TokenSettings

#: Flags of ``build`` that both kinds have.
_SHARED = frozenset(
    {
        "data",
        "out_folder",
        "commit_every",
        "host_memory",
        "events",
        "allow_failed",
        "retry_failed",
        "dry_run",
        "report_to",
        "quiet",
    }
    | {"as_json", "stream"}
)

#: Those of them that have one meaning and one name in the settings of both.
_SAME = ("commit_every", "host_memory", "stream", "events", "retry_failed", "dry_run")

Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="PATH",
        help="Makes a cache of tokens: a tokenizer.json, a folder with one, or stub (bytes).",
        show_default=False,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option("--chat-template", metavar="FILE", help="Jinja; default: the tokenizer's own.", show_default=False),
]


TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--template-option",
        metavar="NAME=JSON",
        help="Given to the template, as enable_thinking=false. Repeat.",
        show_default=False,
    ),
]
Loss = Annotated[
    str | None,
    typer.Option("--loss", metavar="WHERE", help="all (texts), or assistant (conversations).", show_default=False),
]
AddBos = Annotated[
    bool | None, typer.Option("--add-bos/--no-add-bos", help="Begin each text with bos.", show_default=False)
]
AddEos = Annotated[
    bool | None, typer.Option("--add-eos/--no-add-eos", help="End each text with eos.", show_default=False)
]
ControlTokens = Annotated[
    bool | None,
    typer.Option(
        "--control-tokens/--no-control-tokens",
        help="Let control strings in content become control tokens.",
        show_default=False,
    ),
]
Dataset = Annotated[
    list[str] | None,
    typer.Option("--dataset", metavar="NAME", help="Of a dataset_info.json. Repeat.", show_default=False),
]
Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Make share I of N of the records, I from 0: one node of several.",
        show_default=False,
    ),
]
TakeFrom = Annotated[
    list[Path] | None,
    typer.Option(
        "--take-from",
        metavar="CACHE",
        help="Take finished documents over from there: the shares of all nodes. Repeat.",
        show_default=False,
    ),
]
TextLines = Annotated[bool, typer.Option("--text-lines", help="Each line of a text file is a document.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=0, help="Processes that tokenise; 0: none but this.", show_default=False
    ),
]


def token_options(
    *,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    template_option: TemplateOption = None,
    loss: Loss = None,
    add_bos: AddBos = None,
    add_eos: AddEos = None,
    control_tokens: ControlTokens = None,
    dataset: Dataset = None,
    shard: Shard = None,
    take_from: TakeFrom = None,
    text_lines: TextLines = False,
    workers: Workers = None,
) -> dict[str, Any]:
    """What was said of tokens, by the names of ``TokenSettings``; empty where nothing was."""
    given = {
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        "template_options": template_options(template_option or ()) or None,
        "loss": loss,
        "add_bos": add_bos,
        "add_eos": add_eos,
        "control_tokens": control_tokens,
        "datasets": tuple(dataset or ()) or None,
        "share": shard,
        "take_from": tuple(take_from or ()) or None,
        "text_lines": text_lines or None,
        "workers": workers,
    }
    return {name: value for name, value in given.items() if value is not None}


def template_options(words: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """``NAME=JSON`` as pairs, sorted; what is no JSON is taken as text.

    Raises:
        UsageError: There is no ``=``.
    """
    found = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name:
            raise UsageError(f"--template-option {word!r} gives no value", fix="--template-option NAME=JSON")
        try:
            found[name] = json.dumps(json.loads(text), sort_keys=True)
        except ValueError:
            found[name] = json.dumps(text)
    return tuple(sorted(found.items()))


def with_tokens(command: Callable[..., int]) -> Callable[..., int]:
    """Give ``build`` the flags of token builds, and those builds to :func:`latentcache.cli.token_build.build`.

    Typer reads a command's options from its signature, so the signature is what is put together here.
    """
    asked = inspect.signature(token_options, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    others = [parameter for name, parameter in own.items() if name not in _SHARED]
    first = [own[name] for name in ("data", "out_folder")]
    last = [parameter for name, parameter in own.items() if name in _SHARED and parameter not in first]

    @functools.wraps(command)
    def either(**given: Any) -> int:
        said = token_options(**{name: given.pop(name) for name in asked})
        if not said and not _is_for_tokens(given["data"], given["out_folder"]):
            return command(**given)
        for parameter in others:
            if given[parameter.name] != parameter.default:
                flag = "--" + parameter.name.replace("_", "-")
                raise UsageError(f"{flag} is for pictures, and this is a build of tokens", fix=f"leave {flag} out")
        shared = {name: given[name] for name in _SHARED}
        settings = TokenSettings(
            **said,
            data=shared.pop("data"),
            out=shared.pop("out_folder"),
            allow_failed=shared.pop("allow_failed") or "0",
            **{name: shared.pop(name) for name in _SAME},
        )
        from latentcache.cli.token_build import build

        return build(settings, **shared)

    parameters = [*first, *others, *asked.values(), *last]
    vars(either)["__signature__"] = inspect.signature(command).replace(parameters=parameters)
    return either


def _is_for_tokens(data: Path, out: Path | None) -> bool:
    """Whether DATA is a file of records, or the cache is one of tokens."""
    from latentcache.sources.corpus import is_corpus

    return is_corpus(data) or holds_tokens(TokenSettings(data=data, out=out).cache)


def holds_tokens(cache: Path) -> bool:
    """Whether a cache, finished or begun, is one of tokens. Damage says no: then others find the words for it."""
    from latentcache.store.durable import read_file  # a device or a pipe may lie in the place of a file

    try:
        current = read_file(cache / "CURRENT").strip().decode("ascii")
        places = [cache / "generations" / current / "manifest.json"] if current.isdecimal() else []
    except (OSError, UnicodeDecodeError):
        places = []
    for place in (*places, cache / "BUILDING"):
        try:
            found = json.loads(read_file(place))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found.get("kind") == "tokens"
    return False
