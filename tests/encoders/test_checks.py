from latentcache.encoders.versions import device_facts


def test_the_device_is_asked():
    found = device_facts("cpu")
    assert not found["usable"]
    assert found["torch"]
