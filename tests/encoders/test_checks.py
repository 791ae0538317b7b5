from latentcache.encoders.devices import device_report


def test_the_device_is_queried():
    found = device_report("cpu")
    assert not found["usable"]
    assert found["torch"]
