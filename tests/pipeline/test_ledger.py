import threading

import pytest
from small_builds import piece, recipe_of, within

from latentcache.errors import UnusableSampleError
from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.channel import Channel, channel_pair
from latentcache.pipeline.encoding import new_entry
from latentcache.pipeline.forms import located_form
from latentcache.pipeline.ledger import Claims, RemoteLedger, Seen
from latentcache.store.catalog import Located
from latentcache.store.entry import HEADER_BYTES, unpack_facts, unpack_header

MEMO = StatMemo(size=1, mtime_ns=2, ctime_ns=3, inode=4, device=5, seen_ns=6)
SEEN = Seen(index=3, content=b"0123456789abcdef", memo=MEMO, size=Size(20, 30))
KEYS = [bytes([number]) * 32 for number in range(3)]


def test_a_key_is_claimed_once_and_a_committed_one_never():
    claims = Claims(lambda key: key == KEYS[0])
    assert [claims.take(key) for key in (*KEYS, *KEYS)] == [False, True, True, False, False, False]
    claims.release(KEYS[:2])
    assert [claims.take(key) for key in KEYS] == [False, True, False]


def test_many_threads_share_out_the_keys():
    claims, found = Claims(lambda key: False), []
    keys = [bytes([number]) * 32 for number in range(200)]
    threads = [threading.Thread(target=lambda: found.extend(filter(claims.take, keys))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == keys


@pytest.fixture
def remote():
    """A ledger on one end, the answering build on the other."""
    line, theirs = channel_pair()
    channel = Channel(theirs)
    ledger = RemoteLedger(channel)

    def listen():
        while (message := channel.receive()) is not None:
            ledger.answered(message)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    yield ledger, line
    channel.close()
    line.close()
    listener.join(5)


def next_of(line):
    while not (found := line.arrived()):
        pass
    return found[0]


def test_a_question_gets_its_own_answer_in_whatever_order_they_come(remote):
    ledger, line = remote
    found = {}
    threads = [
        threading.Thread(target=lambda k=key: found.update({k: ledger.take(SEEN, [k])}), daemon=True)
        for key in KEYS[:2]
    ]
    asked = []
    for thread in threads:
        thread.start()
        asked.append(next_of(line))
    assert [message["keys"] for message in asked] == [[key.hex()] for key in KEYS[:2]]
    assert asked[0] | {"index": 3, "size": [20, 30], "content": SEEN.content.hex()} == asked[0]
    line.send("answer", to=asked[1]["ask"], wanted=[0])
    line.send("answer", to=asked[0]["ask"], wanted=[])
    for thread in threads:
        thread.join(5)
    assert found == {KEYS[0]: [], KEYS[1]: [KEYS[1]]}


def test_bytes_that_kill_are_refused_with_their_cause(remote):
    ledger, line = remote
    asking = threading.Thread(
        target=lambda: line.send("answer", to=next_of(line)["ask"], refused=["decoder-crash", "it died"])
    )
    asking.start()
    with pytest.raises(UnusableSampleError, match="it died") as error:
        within(5, lambda: ledger.take(SEEN, KEYS))
    assert error.value.slug == "decoder-crash"
    asking.join()


def test_when_the_build_is_gone_there_is_nothing_to_do(remote):
    ledger, _ = remote
    threading.Timer(0.05, ledger.close).start()
    assert within(5, lambda: [ledger.take(SEEN, KEYS)]) == [[]]
    assert within(5, lambda: ledger.fates(3, [b"0" * 16])) == ["wait"]


def test_the_fates_of_a_picture_are_asked_for_together(remote):
    ledger, line = remote
    recipe = recipe_of()
    twin = piece(5, recipe)
    entry = new_entry(twin, recipe, (4, 8, 8), bytes(512))
    located = Located(
        key=twin.key,
        shard="one",
        offset=4096,
        header=unpack_header(bytes(entry.value[:HEADER_BYTES]), twin.key),
        facts=unpack_facts(entry.facts, twin.placement.bucket),
    )
    asked = []

    def answer():
        asked.append(next_of(line))
        line.send("answer", to=asked[0]["ask"], fates=["encode", located_form(located), "wait"])

    asking = threading.Thread(target=answer)
    asking.start()
    hashes = [bytes([number]) * 16 for number in range(3)]
    assert within(5, lambda: ledger.fates(3, hashes)) == ["encode", located, "wait"]
    asking.join()
    assert asked[0] | {"kind": "decoded", "index": 3, "pixels": [item.hex() for item in hashes]} == asked[0]
