import numpy as np
import pytest
from small_tokens import build, opened, write_texts

from latentcache.encoders.stub_tokeniser import stub_description
from latentcache.errors import CacheDamagedError
from latentcache.pipeline.token_assemble import assemble_tokens, manifest_facts, says_the_same
from latentcache.pipeline.token_known import known_documents
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.pipeline.token_survey import survey_records
from latentcache.sources.corpus import scan_records
from latentcache.sources.sample import Refusal
from latentcache.store.catalog import load_catalog
from latentcache.store.layout import CacheLayout


@pytest.fixture
def made(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two", "three"])
    build(data, tmp_path / "cache")
    generation, _ = opened(tmp_path / "cache")
    known = known_documents(load_catalog(CacheLayout(tmp_path / "cache")), None, generation.recipe)
    return data, generation, known


def test_the_draft_of_the_same_data_says_the_same(made):
    data, generation, known = made
    draft = assemble_tokens(survey_records(scan_records(data)), known, {})
    terms = {"allow_failed": "0"}
    assert says_the_same(draft, generation.recipe, generation, terms)
    assert not says_the_same(draft, generation.recipe, generation, {"allow_failed": "1"})
    write_texts(data, ["two", "one", "three"])
    other = assemble_tokens(survey_records(scan_records(data)), known, {})
    assert not says_the_same(other, generation.recipe, generation, terms)
    assert other.documents.start.tolist() == [4, 0, 8]


def test_a_refused_record_is_no_document(made):
    data, _, known = made
    write_texts(data, ["one", "refused", "three"])
    work = survey_records(scan_records(data))
    content = work.content[1].tobytes()
    draft = assemble_tokens(work, known, {content: Refusal(name="?", cause="c", content=content)})
    assert draft.documents.line.tolist() == [1, 3]
    assert [(one.name, one.line) for one in draft.refused] == [("a.jsonl", 2)]
    assert np.array_equal(draft.documents.span_ends, [1, 2])


def test_nothing_is_left_out_in_silence(made):
    data, _, known = made
    write_texts(data, ["one", "never tokenised"])
    with pytest.raises(CacheDamagedError, match="1 documents"):
        assemble_tokens(survey_records(scan_records(data)), known, {})


def test_the_manifest_says_where_it_came_from(made):
    data, _, known = made
    draft = assemble_tokens(survey_records(scan_records(data)), known, {})
    settings = TokenSettings(data=data, out=data.parent / "cache", tokenizer="stub")
    facts = manifest_facts(draft, stub_description(), settings, {"hash": "x"})
    assert facts["source"]["relative"] == "../a.jsonl"
    assert (facts["provenance"]["tokenizer"], facts["tokens"]["documents"]) == ("stub", 3)
    libraries = set(facts["provenance"]["libraries"])
    assert libraries >= {"transformers", "tokenizers", "lmdb"}
    assert not libraries & {"torch", "diffusers", "pillow"}, "which no token passes through"
