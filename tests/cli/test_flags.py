import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from latentcache.cli import flags
from latentcache.fields import registry
from latentcache.fields.protocol import FieldKind
from latentcache.plan.numbers import tolerated


@dataclass(frozen=True, kw_only=True)
class AllTypes:
    switch: bool | None = field(default=None, metadata={"help": "Turn it on."})
    number: int | None = field(default=None, metadata={"help": "Count.", "metavar": "N", "min": 1})
    words: tuple[str, ...] | None = field(default=None, metadata={"flag": "--word", "help": "Say it. Repeatable."})
    choice: str | None = field(default=None, metadata={"help": "Choose.", "choices": ("a", "b")})
    size: str | None = field(default=None, metadata={"help": "Size.", "parse": lambda text: text.upper()})
    model: str | None = field(default=None, metadata={"help": "Model, as of another kind."})
    file: Path | None = field(default=None, metadata={"help": "File.", "metavar": "FILE"})
    hidden: str | None = field(default=None, metadata={"flag": None})


class Toy(FieldKind):
    name = "toy"
    kind = 201
    inputs = ("image",)
    settings = AllTypes


@pytest.fixture
def parse(monkeypatch):
    """Run a command with the options of the toy kind and of the package; return the request."""
    kinds = registry.field_kinds() | {"toy": Toy()}
    monkeypatch.setattr(registry, "field_kinds", lambda: kinds)
    requests = []

    def command(*, requested: flags.Requested) -> flags.Result:
        requests.append(requested)
        return flags.Result({})

    app = typer.Typer()
    app.command()(flags.as_command("toy", command))

    def call(*words):
        typer.main.get_command(app).main(args=[str(word) for word in words], standalone_mode=False)
        return requests[-1]

    return call


WORDS = "--switch --number 3 --word 'x y' --word z --word z --choice a --size big --file f"


def test_no_flags_give_an_empty_request(parse):
    assert parse() == flags.Requested()
    assert (parse().words, parse().common) == ("", "")


def test_each_type_of_setting_is_an_option(parse):
    settings = parse(*shlex.split(WORDS))
    expected = AllTypes(switch=True, number=3, words=("x y", "z"), choice="a", size="BIG", file=Path("f"))
    assert settings.fields == {"toy": expected}


def test_words_reproduce_the_request(parse):
    settings = parse(*shlex.split(WORDS), "--no-switch")
    assert parse(*shlex.split(settings.words)) == settings
    assert "--no-switch" in settings.words


def test_a_flag_of_two_kinds_reaches_the_requested_kinds(parse):
    assert {name: one.model for name, one in parse("--model", "stub").fields.items()} == {
        "latents": "stub",
        "toy": "stub",
    }
    settings = parse("--model", "stub", "--fields", "toy")
    assert settings.fields == {"toy": AllTypes(model="stub")}


@pytest.mark.parametrize("words", [["--choice", "c"], ["--number", "0"]])
def test_values_are_checked(parse, words):
    with pytest.raises(Exception, match=r"choice|1 or more"):
        parse(*words)


def test_every_setting_has_a_help_and_no_default():
    for kind in registry.field_kinds().values():
        for one in dataclasses.fields(kind.settings) if dataclasses.is_dataclass(kind.settings) else ():
            if one.metadata.get("flag", "") is not None:
                assert one.metadata["help"], (kind.name, one.name)
            assert one.default is None


@given(st.integers(0, 1000), st.integers(1, 10**6))
def test_a_percentage_is_exact(tenths, samples):
    assert tolerated(f"{tenths / 10}%", samples) == tenths * samples // 1000


@pytest.mark.parametrize(
    ("words", "slug", "what"),
    [
        (["--bucket", "64"], "usage", "--bucket=64: not a size"),
        (["--bucket", "60x64"], "recipe", "--bucket=60x64: does not fit the grid"),
        (["--bucket", "64x64", "--resolution", "64"], "usage", "--bucket: not with a resolution"),
        (["--resolution", "0"], "recipe", "--resolution=0: no bucket"),
        (["--bucket-step", "0"], "usage", "--bucket-step=0: must be 1 or more"),
        (["--min-side", "512", "--max-side", "64"], "recipe", "--min-side=512: no bucket"),
        (["--crop-variants", "0"], "usage", "--crop-variants=0: must be 1 to 128"),
        (["--storage-dtype", "fp8"], "usage", "--storage-dtype"),
        (["--model", "stub:delay=1"], "usage", "delay=1"),
    ],
)
@pytest.mark.parametrize("command", ["build", "verify"])
def test_invalid_recipe_flags_are_rejected_before_anything_is_written(
    run, shared, tmp_path, command, words, slug, what
):
    new = tmp_path / "new"
    target = [shared[0], "--out", new, "--model", "stub"] if command == "build" else [shared[1]]
    done = run(command, *target, *words, "--json")
    assert (done.status, done.error["slug"]) == (2, slug)
    assert what in done.error["what"]
    assert not new.exists()
