import signal

import pytest

from latentcache.encoders.stub_tokeniser import stub_description
from latentcache.errors import InterruptedBuildError
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.token_report import TokenProgress
from latentcache.pipeline.token_run import TokenRun
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.sources.records import text_record
from latentcache.store.inventory import stored_entries
from latentcache.store.layout import CacheLayout


def run_over(tmp_path, records, stop, **description):
    layout = CacheLayout(tmp_path)
    layout.shards.mkdir()
    progress, refused = TokenProgress(), {}
    run = TokenRun(
        description=stub_description(**description),
        layout=layout,
        settings=TokenSettings(data=tmp_path),
        stop=stop,
        progress=progress,
        refused=refused,
        advanced=lambda progress: None,
    )
    return run, progress, refused


def test_documents_are_committed_and_counted(tmp_path):
    records = [text_record("a", number, text) for number, text in enumerate(["one", "", "three"], 1)]
    run, progress, refused = run_over(tmp_path, records, StopSignal(), add_eos=False)
    run(records, 0)
    assert (progress.done, progress.committed, progress.tokens, progress.refused) == (3, 2, 8, 1)
    assert [(one.cause, one.line) for one in refused.values()] == [("no-tokens", 2)]
    assert [stored.header.true_length for stored in stored_entries(tmp_path, payloads=True)] == [8]


def test_what_is_not_a_full_block_is_left_when_it_is_stopped(tmp_path):
    stop = StopSignal()
    records = [text_record("a", number, "x" * 100_000 + str(number)) for number in range(5)]

    def read():
        yield from records[:3]
        stop.number = signal.SIGTERM
        yield from records[3:]

    run, progress, _ = run_over(tmp_path, records, stop)
    with pytest.raises(InterruptedBuildError):
        run(read(), 0)
    assert progress.committed == progress.done - 1
