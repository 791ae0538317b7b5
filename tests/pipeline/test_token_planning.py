import numpy as np
from small_tokens import build, write_texts

from latentcache.encoders.describe_tokens import describe_tokeniser
from latentcache.pipeline.token_known import known_documents
from latentcache.pipeline.token_planning import divide, refused_elsewhere
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.pipeline.token_survey import survey_records
from latentcache.pipeline.token_taking import OtherCache, open_other
from latentcache.sources.corpus import scan_records
from latentcache.sources.sample import Refusal
from latentcache.store.catalog import load_catalog
from latentcache.store.layout import CacheLayout


def test_each_record_is_there_taken_or_made(tmp_path):
    for name, lines in {"own": ["a", "b"], "one": ["b", "c"], "two": ["c", "dd"]}.items():
        build(write_texts(tmp_path / f"{name}.jsonl", lines), tmp_path / name)
    described = describe_tokeniser("stub", chat=False)
    work = survey_records(scan_records(write_texts(tmp_path / "x.jsonl", ["a", "b", "c", "c", "dd", "e"])))
    others = [open_other(tmp_path / name, described, tmp_path / "own") for name in ("one", "two")]
    known = known_documents(load_catalog(CacheLayout(tmp_path / "own")), None, described.recipe)
    settings = TokenSettings(data=tmp_path / "x.jsonl", out=tmp_path / "own")
    found = divide(settings, described.recipe, work, known, others, {})
    assert found.todo.tolist() == [False, False, True, False, True, True]
    assert found.taken.cache.tolist() == [-1, -1, 0, -1, 1, -1]
    assert (found.plan.reused, found.plan.taken, found.plan.todo, found.plan.characters) == (2, 2, 1, 1)
    assert found.taken.length(np.flatnonzero(found.taken.there)) == 5
    assert found.plan.bytes_to_write == 5 * 2 + 3 * 100


def test_a_refusal_elsewhere_counts_where_nobody_has_the_document(tmp_path):
    build(write_texts(tmp_path / "own.jsonl", ["a", "b"]), tmp_path / "own")
    recipe = describe_tokeniser("stub", chat=False).recipe
    known = known_documents(load_catalog(CacheLayout(tmp_path / "own")), None, recipe)
    nothing = known_documents(load_catalog(CacheLayout(tmp_path / "none")), None, recipe)
    there, gone = known.documents.content[0].tobytes(), bytes(15) + b"\0"
    refused = {content: Refusal(name="x", cause="template", content=content) for content in (there, gone)}
    other = OtherCache(layout=CacheLayout(tmp_path / "none"), known=nothing, refused=refused)
    assert list(refused_elsewhere([other], known)) == [gone]
    assert refused_elsewhere([], known) == {}
