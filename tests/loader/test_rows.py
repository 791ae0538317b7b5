"""Rows of documents, compared with the documents, and packed rows in a real model."""

import pickle

import pytest
import torch
from made_caches import chats, documents, opened, texts

from latentcache import combine
from latentcache.errors import PlanError, UsageError

LAYOUTS = [
    {"pad": 24, "overflow": "split"},
    {"pack": 24, "overflow": "split"},
    {"chunk": 24},
    {"chunk": 24, "cross_document": False},
    {"chunk": 24, "last_chunk": "drop"},
]


def expected_row(view, row, width, ids, spans=None):
    """Compute the expected row from the plan and the documents."""
    plan = view.parts[0].plan
    out = {name: [] for name in ("input_ids", "labels", "position_ids", "seq_idx")}
    for number, piece in enumerate(plan.pieces(row)):
        document, start, length = (int(column[piece]) for column in (plan.document, plan.start, plan.length))
        loss_spans = [(0, len(ids[document]))] if spans is None else spans[document]
        loss = {position for first, count in loss_spans for position in range(first, first + count)}
        for token in range(start, start + length):
            alone = not out["labels"] if plan.cross_document else token == start
            out["labels"].append(ids[document][token] if token in loss and not alone else -100)
            out["input_ids"].append(ids[document][token])
            out["position_ids"].append(token - start)
            out["seq_idx"].append(number + 1)
    count = len(out["input_ids"])
    padding = {
        "input_ids": [view.pad_id] * (width - count),
        "labels": [-100] * (width - count),
        "position_ids": list(range(width - count)),
        "seq_idx": [0] * (width - count),
        "attention_mask": [0] * (width - count),
    }
    out["attention_mask"] = [1] * count
    rows = {name: out[name] + padding[name] for name in out}
    kept = ("position_ids", "seq_idx") if view.settings.isolated else ("attention_mask",)
    return {name: rows[name] for name in ("input_ids", "labels", *kept)}


@pytest.fixture(scope="module")
def fifty(tmp_path_factory):
    ids = texts(50, 40)
    return ids, opened(documents(tmp_path_factory.mktemp("fifty") / "texts", ids))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["texts", "chats"])
@pytest.mark.parametrize("pad", [None, 7, 70_000])
@pytest.mark.filterwarnings("ignore:.*nothing would be learned")
def test_rows_equal_the_documents(tmp_path, layout, kind, pad):
    ids, spans = (texts(40, 60), None) if kind == "texts" else chats(40, 60)
    view = opened(documents(tmp_path / "t", ids, spans, pad=pad)).rows(**layout)
    assert view.pad_id == (1 if pad is None else pad)
    batch = view.batch(range(len(view)))
    for row in range(len(view)):
        expected = expected_row(view, row, 24, ids, spans)
        assert {name: value[row].tolist() for name, value in batch.items()} == expected
        assert {name: value.tolist() for name, value in view[row].items()} == expected
    assert view.tokens + sum(view.tokens_dropped.values()) == sum(map(len, ids))
    assert 0 < view.packing_efficiency <= 1
    assert len(repr(view).splitlines()) <= 5


@pytest.mark.parametrize("bad", [-51, 50, 1000])
def test_a_row_that_does_not_exist_is_an_index_error_of_this_package(fifty, bad):
    view = fifty[1].rows(pad=64)
    assert torch.equal(view[-1]["input_ids"], view[49]["input_ids"])
    assert len(list(view)) == 50  # iteration ends with IndexError
    for read in (lambda: view[bad], lambda: view.batch([0, bad]), lambda: view.__getitems__([bad])):
        with pytest.raises(IndexError) as caught:
            read()
        assert isinstance(caught.value, UsageError)
        assert str(bad) in caught.value.what


@pytest.mark.parametrize("bad", [[[0], [1, 2]], torch.tensor([0.0], requires_grad=True)])
def test_rows_that_are_no_array_of_numbers_are_an_error_of_this_package(fifty, bad):
    view = fifty[1].rows(pad=64)
    for read in (view.batch, view.loader(batch_size=2).batch):
        with pytest.raises(UsageError, match="must be whole numbers from 0 to 49"):
            read(bad)


def test_negative_rows_of_a_combined_view_serve_nothing_else(fifty):
    view = combine([fifty[1].rows(pad=64)] * 2)
    with pytest.raises(UsageError, match="rows="):
        view.batch([-1])
    assert torch.equal(view[-1]["input_ids"], view[99]["input_ids"])


def test_padding_rows_have_no_labels_and_numbers_do_not_count_them(fifty):
    view = fifty[1].rows(pad=64)
    tokens = trainable = 0
    for batch in view.loader(batch_size=8, remainder="pad", fields=["meta", "names"]):
        pad = batch["is_pad_row"]
        assert (batch["labels"][pad] == -100).all()
        assert (batch["attention_mask"][pad].sum(1) > 0).all()
        tokens += batch["meta"]["tokens"]
        trainable += batch["meta"]["trainable_tokens"]
        assert len(batch["names"]) == 8
    assert tokens == view.tokens
    assert trainable == view.tokens - 50
    with pytest.warns(UserWarning, match="hold padding only"):
        view.loader(batch_size=1, rank=0, world_size=8, remainder="pad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs one of pack, pad and chunk"),
        ({"pack": 8, "pad": 8}, "pack=8, pad=8"),
        ({"pack": 1}, "pack=1"),
        ({"pack": 2.5}, "pack=2.5"),
        ({"chunk": 8, "overflow": "drop"}, "overflow: not with chunk"),
        ({"pad": 8, "last_chunk": "drop"}, "last_chunk: not with pad"),
        ({"pad": 8, "overflow": "skip"}, "overflow='skip'"),
        ({"pad": 8, "field": "ids"}, "field='ids'"),
    ],
)
def test_options_that_are_not_allowed(fifty, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        fifty[1].rows(**options)
    assert caught.value.fix


def test_conversations_are_not_cut_unless_requested(tmp_path):
    ids, spans = chats(30, 60)
    cache = opened(documents(tmp_path / "t", ids, spans))
    with pytest.raises(PlanError, match="longer than 16 tokens"):
        cache.rows(pack=16)
    with pytest.warns(UserWarning, match="nothing would be learned"):
        view = cache.rows(pad=16, overflow="truncate_right")
    assert {reason for reason, _, _ in view.dropped} <= {"truncated", "no_loss"}
    assert view.tokens_dropped["truncated"] > 0
    with pytest.raises(PlanError, match="makes no row of tokens"):
        opened(documents(tmp_path / "e", [[5, 1]], [[]], loss="assistant")).rows(pad=16)
    with pytest.warns(UserWarning, match="are left out: nothing would be learned of them; the first is data.jsonl:2"):
        opened(documents(tmp_path / "s", [[5, 6, 1], [5, 1]], [[(0, 3)], []])).rows(pad=16)


def test_views_are_picklable(fifty):
    view = fifty[1].rows(pack=64)
    copy = pickle.loads(pickle.dumps(view))
    assert torch.equal(copy.batch([1])["labels"], view.batch([1])["labels"])
    assert view.transform({"row": [0, 1]})["input_ids"].shape == (2, 64)


def test_combined_views_serve_both_in_exact_proportions(fifty, tmp_path):
    other = opened(documents(tmp_path / "few", texts(10, 40, seed=9))).rows(pad=64)
    fifty_rows = fifty[1].rows(pad=64)
    mixed = combine([fifty_rows, other], weights=[3, 1], samples=40)
    assert [source.samples for source in mixed.plan(batch_size=4).sources] == [30, 10]
    loader = mixed.loader(batch_size=4)
    assert sum(len(batch["input_ids"]) for batch in loader) == 40
    with pytest.raises(UsageError, match="cannot be in one batch"):
        combine([fifty_rows, fifty[1].rows(pad=32)])


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=1100, num_key_value_heads=2, **sizes)).eval()


@pytest.mark.parametrize("form", [None, "transformers", "flat"])
def test_packed_documents_do_not_see_each_other_in_a_real_model(tmp_path, model, form):
    """``model(**batch)``: a changed document A leaves the logits of document B unchanged."""
    ids = texts(24, 30)
    changed = [[token + 7 if token > 1 else token for token in document] for document in ids]
    views = [
        opened(documents(tmp_path / name, tokens)).rows(pack=64) for name, tokens in (("a", ids), ("b", changed))
    ]
    plan = views[0].parts[0].plan
    row = next(row for row in range(len(plan)) if len(plan.pieces(row)) > 1)
    first = int(plan.length[plan.pieces(row)[0]])
    batches = [dict(view.loader(batch_size=1, format=form).batch([row])) for view in views]
    mixed = batches[0] | {"input_ids": batches[0]["input_ids"].clone()}
    mixed["input_ids"][0, :first] = batches[1]["input_ids"][0, :first]
    with torch.no_grad():
        before, after = (model(**batch).logits[0] for batch in (batches[0], mixed))
        alone = model(
            input_ids=batches[0]["input_ids"][:, first : int(plan.length[plan.pieces(row)[1]]) + first]
        ).logits[0]
    assert not torch.allclose(before[:first], after[:first])
    assert torch.allclose(before[first:], after[first:], atol=1e-6)
    assert torch.allclose(before[first : first + len(alone)], alone, atol=1e-5)
    collated = views[0].collator(form)(views[0].__getitems__([row]))
    assert collated["use_cache"] is False


def test_rows_that_do_not_make_a_batch(tmp_path):
    cache = opened(documents(tmp_path, texts(24, 30)))
    packed, padded, short = cache.rows(pack=64), cache.rows(pad=64), cache.rows(pad=32)
    for rows in ([], [padded[0], short[0]], [padded[0], packed[0]]):
        with pytest.raises(UsageError, match="do not make a batch"):
            padded.collator()(rows)
