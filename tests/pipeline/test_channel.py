import socket
import threading

from hypothesis import given
from hypothesis import strategies as st
from small_builds import within

from latentcache.pipeline.channel import Channel, channel_pair

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def heard(line, count):
    found = []
    while len(found) < count and not line.ended:
        found += line.arrived()
    return found


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), json_values), max_size=6))
def test_messages_arrive_whole_and_in_order_both_ways(messages):
    line, theirs = channel_pair()
    channel = Channel(theirs)
    for message in messages:
        line.send("down", **message)
        channel.send("up", **message)
    assert [channel.receive() for _ in messages] == [{"kind": "down", **message} for message in messages]
    assert heard(line, len(messages)) == [{"kind": "up", **message} for message in messages]
    channel.close()
    line.close()


def test_a_line_never_waits_for_a_worker_that_does_not_read():
    line, theirs = channel_pair()
    big = "x" * 1_000_000

    def send():
        for number in range(20):
            line.send("big", number=number, text=big)

    within(10, send)
    channel, found = Channel(theirs), []
    reader = threading.Thread(target=lambda: found.extend(channel.receive()["number"] for _ in range(20)))
    reader.start()
    while reader.is_alive():
        line.flush()
    assert found == list(range(20))
    channel.close()
    line.close()


def test_a_worker_that_ends_is_heard_to_its_last_word():
    line, theirs = channel_pair()
    channel = Channel(theirs)
    channel.send("last", word="goodbye")
    channel.close()
    assert heard(line, 2) == [{"kind": "last", "word": "goodbye"}]
    assert line.ended
    line.send("too late")
    line.close()


def test_a_build_that_is_gone_is_noticed_and_nothing_is_raised():
    line, theirs = channel_pair()
    channel = Channel(theirs)
    line.close()
    assert channel.receive() is None
    channel.send("anybody there")
    channel.send("hello")
    channel.close()


def test_half_a_message_is_none():
    mine, theirs = socket.socketpair()
    channel = Channel(theirs)
    mine.sendall(b"\x10\0\0\0{}")
    mine.close()
    assert channel.receive() is None
    channel.close()


def test_closing_wakes_who_is_waiting():
    line, theirs = channel_pair()
    channel = Channel(theirs)
    threading.Timer(0.05, channel.close).start()
    assert within(5, lambda: [channel.receive()]) == [None]
    line.close()
