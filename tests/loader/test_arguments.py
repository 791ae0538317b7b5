"""Every argument of caches, views and loaders with what nobody should give: it works, or is refused in words."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from made_tokens import cache_of, texts
from small_cache import build, draw_four

from latentcache import combine_caches, combine_views, open_cache
from latentcache.errors import DeviceError, PlanError, UsageError

NAN, INF = float("nan"), float("inf")
ODD = [
    None, True, False, 0, 1, 2, -1, 1.5, 2.0, NAN, INF, "1", "", b"x", [], [1], (1,), {}, object, np.int64(2),
    np.uint8(1), np.float32(0.3), np.float64(1.0), np.bool_(True), np.array(2), np.array([1]), torch.tensor(1),
    torch.tensor([1.0]), 2**40, 2**70, -(2**70), 1e300, Fraction(1, 3), 1j, object(), {"a": 1}, {1}, lambda: 1,
]  # fmt: skip
WHOLE = (np.integer, int)
#: Arguments that are whole numbers, with the least of them.
COUNTS = {
    "batch_size": 1, "world_size": 1, "rank": 0, "seed": -(2**80), "prefetch": 0, "max_substitutes": 0, "times": 1,
    "grad_accum": 1, "step": 0, "epoch": 0, "max_length": 2, "batch": 1, "samples": 1, "rows": 1,
}  # fmt: skip
#: Those that may be left out, as None.
OPTIONAL = {"max_substitutes", "times", "samples", "rows"}
TOKENS = texts(13, 60)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """What may be called, and with which words it works."""
    folder = tmp_path_factory.mktemp("arguments")
    build(draw_four(folder / "data"), folder / "cache")
    cache, tokens = open_cache(folder / "cache"), cache_of(TOKENS)
    view, lengths = tokens.padded(64), tokens.padded(64, lengths=[16, 64])
    loader = cache.loader(batch_size=2)
    return {
        "loader": (cache.loader, {"batch_size": 2}),
        "plan": (cache.plan, {"batch_size": 2}),
        "split": (cache.split, {}),
        "repeated": (cache.repeated, {}),
        "steps": (loader.steps, {"epochs": 1}),
        "epoch_at": (loader.epoch_at, {"step": 1}),
        "set_epoch": (loader.set_epoch, {}),
        "combine": (combine_caches, {"caches": [cache, cache], "weights": [1, 1]}),
        "token split": (tokens.split, {}),
        "padded": (tokens.padded, {"max_length": 64, "overflow": "split"}),
        "packed": (tokens.packed, {"max_length": 64}),
        "blocks": (tokens.blocks, {"max_length": 64}),
        "of_source": (lambda name: tokens.of_source(name), {}),
        "view loader": (view.loader, {"batch_size": 2}),
        "view plan": (view.plan, {"batch_size": 2}),
        "view steps": (view.steps, {"epochs": 1, "batch_size": 2}),
        "bucket": (lengths.bucket, {}),
        "combine_views": (combine_views, {"views": [view], "weights": [1]}),
    }


LOADER = "batch_size seed rank world_size small_buckets format prefetch device"
ARGUMENTS = {
    "loader": f"{LOADER} scaled latents flip dtype mapped on_bad max_substitutes",
    "plan": "batch_size world_size small_buckets seed",
    "split": "validation",
    "repeated": "times",
    "steps": "epochs grad_accum",
    "epoch_at": "step grad_accum",
    "set_epoch": "epoch",
    "combine": "caches weights samples",
    "token split": "validation",
    "padded": "max_length padding_side overflow lengths idle",
    "packed": "max_length overflow idle",
    "blocks": "max_length tail crossing idle",
    "of_source": "name",
    "view loader": LOADER,
    "view plan": "batch_size world_size small_buckets",
    "view steps": "epochs batch_size world_size grad_accum drop_last",
    "bucket": "batch",
    "combine_views": "views weights rows by",
}
EACH = [(call, argument) for call, arguments in ARGUMENTS.items() for argument in arguments.split()]


@pytest.mark.filterwarnings("ignore:.*are left out")
@pytest.mark.parametrize(("call", "argument"), EACH)
def test_it_works_or_is_refused_in_words(calls, call, argument):
    function, words = calls[call]
    for value in ODD:
        error = refused(function, words | {argument: value})
        if error is not None:
            assert error.fix
            assert 0 < len(error.what) < 300
        elif argument in COUNTS:
            assert is_count(value, argument), f"{argument}={value!r} was taken"


def refused(function, words):
    """In which words a call is refused, if it is."""
    try:
        function(**words)
    except (UsageError, DeviceError, PlanError) as error:
        return error
    return None


def is_count(value, argument):
    if value is None:
        return argument in OPTIONAL
    return isinstance(value, WHOLE) and not isinstance(value, bool) and value >= COUNTS[argument]


@pytest.mark.filterwarnings("ignore:.*are left out")
@pytest.mark.parametrize(("call", "argument"), [each for each in EACH if each[1] in COUNTS])
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.int16])
def test_numbers_of_numpy_work_where_plain_ones_do(calls, call, argument, kind):
    function, words = calls[call]
    value = {"max_length": 64, "rank": 0, "samples": 9, "rows": 9}.get(argument, 2)
    function(**words | {argument: kind(value)})


@pytest.mark.parametrize("call", ["split", "token split"])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, Fraction])
def test_a_share_of_another_kind_is_the_same_share(calls, call, kind):
    function, _ = calls[call]
    for plain, other in zip(function(0.3), function(kind("0.3")), strict=True):
        assert len(plain) == len(other)
    for value in (True, "0.3", None, [0.3], np.array([0.3])):
        with pytest.raises(UsageError, match="validation="):
            function(value)


def given_as(number, given):
    """A word of a view, with numbers of a kind."""
    if isinstance(given, list):
        return [number(one) for one in given]
    return given if number is int else np.bool_(given)


def test_rows_of_numbers_of_numpy_have_the_identity_of_plain_ones():
    """A plan that is kept under plain numbers is found again, and so is a checkpoint."""
    tokens = cache_of(TOKENS)
    for kind, words in (("padded", {"lengths": [16, 64]}), ("packed", {}), ("blocks", {"crossing": False})):
        make = getattr(tokens, kind)
        plain, other = (
            make(number(64), **{name: given_as(number, given) for name, given in words.items()})
            for number in (int, np.int32)
        )
        assert plain.identity == other.identity
        assert type(other.max_length) is int
