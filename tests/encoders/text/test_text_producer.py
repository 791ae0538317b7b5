import json

from described import described_tokenizer
from made_tokenizers import byte_level, save

from latentcache.encoders.text.producer import TokenProducer
from latentcache.fields.protocol import Failure, Job, Made, Output, ProducerContext
from latentcache.sources.records import text_record


def opened(description):
    about = json.loads(json.dumps(description.producer))
    return TokenProducer(about, description.recipe, ProducerContext(root="/"))


def job(record, number=0):
    inputs = {"record": record}
    return Job(
        sample=number, name=f"{record.source}:{record.line}", inputs=inputs, outputs=(Output(item=0, group=0),)
    )


def produce(tokens, *records):
    return tokens.encode([item for record in records for item in tokens.prepare(job(record), {})])


def test_a_record_without_tokens_and_one_that_fails_are_failures(tmp_path):
    folder = save(byte_level(), tmp_path, roles={"eos_token": "<|im_end|>"})
    tokens = opened(described_tokenizer(folder, add_eos=False))
    empty, reserved, fine = produce(
        tokens, text_record("a", 1, ""), text_record("a", 2, "x\ufdd0"), text_record("a", 3, "fine")
    )
    assert isinstance(empty, Failure)
    assert empty.reason == "no-tokens"
    assert reserved.reason == "reserved-character"
    assert isinstance(fine, Made)
