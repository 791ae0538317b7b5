import numpy as np
import pytest
from small_builds import FakeEncoder, LateEncoder, float32_latents, one_row_less, piece, recipe_of

from latentcache.encoders.protocol import EncodedBatch
from latentcache.encoders.stub import StubEncoder
from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import checksum
from latentcache.pipeline.batch_size import BatchSizes
from latentcache.pipeline.encoding import BatchEncoder, new_entry
from latentcache.store.entry import HEADER_BYTES, unpack_facts, unpack_header

RECIPE = recipe_of()


class Bench:
    """A batch encoder with a record of what it said."""

    def __init__(self, encoder, batch_size=8, recipe=RECIPE):
        self.refused, self.warnings = {}, []
        self.batches = BatchEncoder(
            encoder=encoder,
            recipe=recipe,
            sizes=BatchSizes(batch_size),
            refuse=lambda piece, cause, detail: self.refused.update({piece.name: (cause, detail)}),
            warn=self.warnings.append,
        )

    def encode(self, pieces):
        return self.batches.encode(pieces)


def expected(pieces):
    """What the stub gives for each picture alone."""
    return {p.key: StubEncoder().encode(p.pixels[None]).latents[0].tobytes() for p in pieces}


def payloads(entries):
    return {entry.key: bytes(entry.value[HEADER_BYTES:]) for entry in entries}


def test_every_piece_becomes_the_entry_of_its_own_pixels():
    pieces = [piece(seed, RECIPE) for seed in range(5)]
    encoder = FakeEncoder()
    entries = Bench(encoder, batch_size=2).encode(pieces)
    assert payloads(entries) == expected(pieces)
    assert encoder.calls == [(2, False), (2, False), (1, False)]


def test_an_entry_says_what_it_is():
    one = piece(3, RECIPE)
    (entry,) = Bench(FakeEncoder()).encode([one])
    header = unpack_header(bytes(entry.value[:HEADER_BYTES]), one.key)
    assert (header.dtype, header.shape, header.content) == ("float16", (4, 8, 8), one.content)
    assert (header.recipe_id, header.original_size) == (RECIPE.recipe_id, Size(64, 64))
    assert header.payload_checksum == checksum(entry.value[HEADER_BYTES:])
    facts = unpack_facts(entry.facts, Size(64, 64))
    assert (facts.pixel_hash, facts.placement) == (one.pixel_hash, one.placement)


def test_an_entry_made_from_a_twin_holds_its_latents():
    one = piece(3, RECIPE)
    entry = new_entry(one, RECIPE, (4, 8, 8), b"x" * 512)
    assert payloads([entry]) == {one.key: b"x" * 512}


def test_out_of_memory_halves_the_batch_and_tries_the_same_pictures_again():
    pieces = [piece(seed, RECIPE) for seed in range(8)]
    bench = Bench(FakeEncoder(most=3))
    entries = bench.encode(pieces)
    assert payloads(entries) == expected(pieces)
    assert [size for size, _ in bench.batches.encoder.calls] == [8, 4, 2, 2, 2, 2]
    assert bench.refused == {}
    assert bench.warnings == [
        "out of memory at batch 8 of 64x64; going on with 4",
        "out of memory at batch 4 of 64x64; going on with 2",
    ]


def test_the_halved_size_is_remembered_for_its_bucket_alone():
    bench = Bench(FakeEncoder(most=4))
    bench.encode([piece(seed, RECIPE) for seed in range(8)])
    assert bench.batches.sizes.limit(Size(64, 64)) == 4
    assert bench.batches.sizes.limit(Size(32, 96)) == 8
    bench.batches.encoder.calls.clear()
    bench.encode([piece(seed, RECIPE) for seed in range(8)])
    assert bench.batches.encoder.calls == [(4, False), (4, False)]
    assert len(bench.warnings) == 1


def test_a_picture_that_does_not_fit_alone_is_refused_and_the_others_are_not():
    class Hungry(FakeEncoder):
        def encode(self, pixels, *, precise=False):
            large = any(np.array_equal(picture, big.pixels) for picture in pixels)
            self.most = 0 if large else None
            return super().encode(pixels, precise=precise)

    big, *others = (piece(seed, RECIPE) for seed in range(6))
    bench = Bench(Hungry())
    entries = bench.encode([others[0], big, *others[1:]])
    assert payloads(entries) == expected(others)
    assert bench.refused == {big.name: ("out-of-memory", "1 pictures are too many")}


def test_latents_that_are_not_finite_come_from_the_precise_retry():
    pieces = [piece(seed, RECIPE) for seed in range(4)]
    bench = Bench(FakeEncoder(broken=[pieces[2].pixels], mends=True))
    entries = bench.encode(pieces)
    assert payloads(entries) == expected(pieces)
    assert bench.batches.encoder.calls == [(4, False), (1, True)]
    assert bench.refused == {}


def test_latents_that_are_never_finite_are_refused_and_not_stored():
    pieces = [piece(seed, RECIPE) for seed in range(4)]
    bench = Bench(FakeEncoder(broken=[pieces[0].pixels, pieces[2].pixels]))
    entries = bench.encode(pieces)
    assert payloads(entries) == expected([pieces[1], pieces[3]])
    assert {name: cause for name, (cause, _) in bench.refused.items()} == dict.fromkeys(
        (pieces[0].name, pieces[2].name), "non-finite"
    )


def test_values_beyond_the_storage_type_are_called_so():
    class Bright(FakeEncoder):
        def encode(self, pixels, *, precise=False):
            encoded = super().encode(pixels, precise=precise)
            encoded.latents[:, 0] = np.inf
            return EncodedBatch(latents=encoded.latents, finite=np.zeros(len(pixels), dtype=bool))

    bench = Bench(Bright())
    assert bench.encode([piece(1, RECIPE)]) == []
    assert bench.refused["1.png"][0] == "storage-overflow"


def test_a_precise_retry_that_does_not_fit_costs_that_picture_alone():
    pieces = [piece(seed, RECIPE) for seed in range(4)]
    bench = Bench(FakeEncoder(broken=[pieces[1].pixels], precise_memory=False))
    assert payloads(bench.encode(pieces)) == expected([pieces[0], pieces[2], pieces[3]])
    assert bench.refused["1.png"][0] == "out-of-memory"
    assert bench.batches.sizes.limit(Size(64, 64)) == 8
    assert len(bench.batches.encoder.calls) == 2


@pytest.mark.parametrize("change", [one_row_less, float32_latents])
def test_another_shape_or_type_is_an_error_of_the_encoder(change):
    bench = Bench(FakeEncoder(change=change))
    with pytest.raises(EncoderError, match="another shape or type") as caught:
        bench.encode([piece(1, RECIPE)])
    assert "expected (1, 4, 8, 8)" in caught.value.why


def test_a_lost_device_ends_the_work():
    class Lost(FakeEncoder):
        def encode(self, pixels, *, precise=False):
            raise DeviceError("the device is gone")

    with pytest.raises(DeviceError, match="gone"):
        Bench(Lost()).encode([piece(1, RECIPE)])


@pytest.mark.parametrize("posterior", ["sample", "moments"])
def test_what_is_drawn_does_not_depend_on_the_batch(posterior):
    recipe = recipe_of(latents=posterior)
    pieces = [piece(seed, recipe) for seed in range(5)]
    one = Bench(StubEncoder(posterior=posterior), batch_size=5, recipe=recipe).encode(pieces)
    other = Bench(StubEncoder(posterior=posterior), batch_size=2, recipe=recipe).encode(pieces[::-1])
    assert payloads(one) == payloads(other)
    channels = {unpack_header(bytes(entry.value[:HEADER_BYTES]), entry.key).shape[0] for entry in one}
    assert channels == {8 if posterior == "moments" else 4}


def test_moments_that_are_not_finite_are_encoded_again_before_they_are_drawn():
    recipe = recipe_of(latents="sample")
    pieces = [piece(seed, recipe) for seed in range(3)]

    class Mending(StubEncoder):
        def encode(self, pixels, *, precise=False):
            encoded = super().encode(pixels, precise=precise)
            if not precise:
                encoded.latents[0, 0, 0, 0] = np.nan
            return encoded

    bench = Bench(Mending(posterior="sample"), recipe=recipe)
    assert payloads(bench.encode(pieces)) == payloads(
        Bench(StubEncoder(posterior="sample"), recipe=recipe).encode(pieces)
    )
    assert bench.refused == {}


def test_the_device_has_two_batches_at_most_and_all_come_back():
    pieces = [piece(seed, RECIPE) for seed in range(11)]
    encoder = LateEncoder()
    bench = Bench(encoder, batch_size=2)
    assert payloads(bench.encode(pieces)) == expected(pieces)
    assert (encoder.peak, encoder.in_flight) == (2, 0)


def test_what_was_submitted_is_fetched_when_it_is_done():
    bench = Bench(LateEncoder(), batch_size=4)
    pieces = [piece(seed, RECIPE) for seed in range(8)]
    assert bench.batches.submit(pieces[:4]) == bench.batches.collect(wait=False) == []
    assert bench.batches.busy
    bench.batches._flights[0].pending.finished = True
    (done,) = bench.batches.submit(pieces[4:])
    assert done.pieces == pieces[:4]
    assert payloads(done.entries) == expected(pieces[:4])
    (last,) = bench.batches.collect(wait=True)
    assert payloads(last.entries) == expected(pieces[4:])
    assert not bench.batches.busy


def test_memory_that_runs_out_while_another_batch_is_computed():
    pieces = [piece(seed, RECIPE) for seed in range(16)]
    bench = Bench(LateEncoder(most=3))
    assert payloads(bench.encode(pieces)) == expected(pieces)
    assert bench.refused == {}
    assert len(bench.warnings) == 2


def test_a_single_picture_gets_the_device_to_itself_before_it_is_given_up():
    class Crowded(LateEncoder):
        def submit(self, pictures, *, precise=False):
            if self.in_flight:
                raise DeviceMemoryError("out of memory", why="another batch is in the way")
            return super().submit(pictures, precise=precise)

    pieces = [piece(seed, RECIPE) for seed in range(3)]
    bench = Bench(Crowded(), batch_size=1)
    assert payloads(bench.encode(pieces)) == expected(pieces)
    assert bench.refused == {}


def test_memory_that_is_missed_only_when_the_result_is_fetched():
    class Late(LateEncoder):
        def submit(self, pictures, *, precise=False):
            most, self.most = self.most, None
            pending = super().submit(pictures, precise=precise)
            self.most = most
            return pending

    pieces = [piece(seed, RECIPE) for seed in range(9)]
    bench = Bench(Late(most=2), batch_size=8)
    assert payloads(bench.encode(pieces)) == expected(pieces)
    assert bench.refused == {}
    none = Bench(Late(most=0), batch_size=2)
    assert none.encode(pieces[:3]) == []
    assert {cause for cause, _ in none.refused.values()} == {"out-of-memory"}
