import pickle

from latentcache.encoders.stub_tokeniser import stub_description


def test_a_description_travels_between_processes():
    description = stub_description(delay_ms=3)
    assert pickle.loads(pickle.dumps(description)) == description
