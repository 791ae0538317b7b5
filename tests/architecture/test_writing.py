"""Count how pages, helps and errors are written; the limits are those that the tree holds."""

import ast
import re

import pytest
import typer
from package_source import ROOT, modules
from prose import READ, per_thousand, prose, sentences, words

from latentcache.cli.app import application

#: Words that no page, help or error uses: archaic, a double meaning, or the machine as a person.
FORBIDDEN = re.compile(
    r"\b(nobody|for ever|goes by|of ours|in words|without a word|hears|lies (in|on|beside)|stands for)\b",
    re.IGNORECASE,
)
PASSIVE = re.compile(r"\bcannot be\b", re.IGNORECASE)
#: Options of other programs on pages.
OTHER_PROGRAMS = {
    "--concat_tokens", "--count", "--data-path", "--dataset_config", "--edge-threshold", "--eod-mask-loss", "--head",
    "--help", "--include", "--local-dir", "--masked_loss", "--megabytes", "--nproc-per-node", "--only", "--parts",
    "--reset-attention-mask", "--reset-position-ids", "--rounds", "--side", "--train-data-path", "--valid-data-path",
    "--version", "--install-completion", "--block", "--disable-usage-stats", "--port", "--skip_existing",
    "--array", "--cpus-per-task", "--dependency", "--gres", "--nnodes", "--parsable", "--rdzv-backend",
    "--rdzv-endpoint", "--time", "--wrap",
}  # fmt: skip
EVERYTHING = prose("\n\n".join(page.read_text("utf-8") for page in READ))


def helps():
    group = typer.main.get_command(application())
    for command in group.commands.values():
        yield from (command.help or "", *(parameter.help or "" for parameter in command.params))


def error_texts():
    """Yield the text of every error that the package raises, with X for each value."""
    for tree in modules().values():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Error"):
                named = [one.value for one in call.keywords if one.arg in ("why", "fix")]
                for text in (*call.args, *named):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        yield text.value
                    elif isinstance(text, ast.JoinedStr):
                        yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in text.values)


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_a_sentence_has_at_most_twenty_words(page):
    assert [text for text in sentences(page.read_text("utf-8")) if len(words(text)) > 20 and " · " not in text] == []


def test_pages_sound_like_a_person():
    assert per_thousand("of", EVERYTHING) <= 16
    assert per_thousand("you", EVERYTHING) >= 5
    assert 1000 * EVERYTHING.count(";") / len(words(EVERYTHING)) <= 1.5


def test_helps_sound_like_a_person():
    texts = sorted(set(helps()))
    assert per_thousand("of", " ".join(texts)) <= 15
    assert max(len(words(part)) for text in texts for part in re.split(r"[.;:!?]\s", text)) <= 26


def test_errors_sound_like_a_person():
    texts = list(error_texts())
    assert len(texts) > 500
    assert per_thousand("of", " ".join(texts)) <= 40
    assert max(len(words(part)) for text in texts for part in re.split(r"[.;:!?]\s", text)) <= 23
    assert sum(bool(PASSIVE.search(text)) for text in texts) <= 28


def test_nothing_uses_a_forbidden_word():
    texts = [EVERYTHING, *helps(), *error_texts()]
    assert [text[:80] for text in texts if FORBIDDEN.search(text)] == []
    assert not PASSIVE.search(EVERYTHING)


def test_pages_outside_reference_and_format_have_at_most_20000_words():
    """A table's borders are not words."""
    count = sum(len(page.read_text("utf-8").replace("|", " ").split()) for page in READ if page.name != "README.md")
    assert count <= 20_000


def test_the_counts_find_what_they_count():
    assert sentences("# A title\n\nOne `x y` two. Three:\n\n- four\n- five\n") == [
        "One X two.",
        "Three:",
        "four",
        "five",
    ]
    assert per_thousand("of", "a b of c") == 250
    assert FORBIDDEN.search("Nobody needs it")


def test_every_option_on_a_page_exists():
    group = typer.main.get_command(application())
    parameters = [parameter for command in group.commands.values() for parameter in command.params]
    known = {
        word for parameter in parameters for word in (*parameter.opts, *parameter.secondary_opts)
    } | OTHER_PROGRAMS
    found = {
        (page.name, word) for page in READ for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text("utf-8"))
    }
    assert sorted(pair for pair in found if pair[1] not in known) == []


def test_a_release_has_at_most_fifteen_lines_of_changes():
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.M)[1:]
    assert [len(re.findall("^- ", release, flags=re.M)) <= 15 for release in releases] == [True] * len(releases)
