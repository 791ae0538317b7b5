import pytest

from latentcache.encoders.vae.builtin import EncodedBatch, StubEncoder

KEYS = {
    "asked", "seed", "samples", "entries", "drifted", "device", "largest", "mean", "confidence",
}  # fmt: skip


def test_the_object(run, shared):
    done = run("verify", shared[1], "--reencode", "3", "--seed", "4", "--json")
    assert done.status == 0
    found = done.json["reencoded"]
    assert set(found) == KEYS
    assert (found["asked"], found["seed"], found["samples"], found["device"]) == (3, 4, 3, "cpu")
    assert found["confidence"].startswith("3 samples clean: 95 % sure")
    assert done.json["checked"]["reencoded"] == 3
    assert run("verify", shared[1], "--json").json["reencoded"] is None


def test_drift_is_shown_with_its_command(run, cache, data):
    submit = StubEncoder.submit

    def other(self, images, **options):
        encoded = submit(self, images, **options)
        return EncodedBatch(latents=-encoded.latents, finite=encoded.finite)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StubEncoder, "submit", other)
        done = run("verify", cache, "--reencode", "2", "--device", "cpu", "--json")
    assert (done.status, done.json["counts"]["drift"], done.json["counts"]["ok"]) == (1, 2, 2)
    assert (done.json["reencoded"]["drifted"], done.json["reencoded"]["confidence"]) == (2, "")
    fixes = {item["fix"] for item in done.json["items"]}
    flags = "--reencode 2 --seed 0 --device cpu --repair --yes"
    assert fixes == {f"latentcache verify {cache} {flags}; latentcache build {data} --out {cache} --device cpu"}


@pytest.mark.parametrize(
    "flags",
    [("--reencode", "3", "--untrusted"), ("--device", "cpu"), ("--reencode", "0")],
    ids=" ".join,
)
def test_flags_that_cannot_be(run, shared, flags):
    done = run("verify", shared[1], *flags, "--json")
    assert done.status == 2
    assert done.error["fix"]
