"""Builds of tokens that are announced, and shards that come of them one by one."""

import shutil

import numpy as np
from small_tokens import opened

from latentcache.store.coming import TOKENS_COMING_VERSION
from latentcache.store.layout import CacheLayout
from latentcache.store.token_coming import TokenAnnouncement, announce_tokens

FACTS = {"source": {"root": "/data", "relative": "../data", "options": {}}, "provenance": {"parts": {}}}
VERSION = TOKENS_COMING_VERSION


def announcement(built, *, more=0, before=0):
    """What a build would have said of a cache, and so many records that it has not."""
    generation, _ = opened(built)
    documents = generation.documents
    last = int(documents.line[-1])
    return TokenAnnouncement(
        recipe=generation.recipe,
        content=np.concatenate([documents.content, np.full((more, 16), 7, dtype=np.uint8)]),
        source=np.append(documents.source, np.zeros(more, dtype=np.int32)).astype(np.int32),
        line=np.append(documents.line, np.arange(last + 1, last + 1 + more)).astype(np.uint32),
        sources=documents.sources,
        facts=FACTS,
        before=before,
    )


def announced(built, cache, **more):
    """A new cache in which that build is under way; its layout, and the path of its log."""
    layout = CacheLayout(cache)
    layout.shards.mkdir(parents=True, exist_ok=True)
    return layout, announce_tokens(layout, announcement(built, **more))


def seal(built, layout):
    """The shards of a finished cache are sealed in another."""
    for folder in CacheLayout(built).all_sealed():
        shutil.copytree(folder, layout.shards / folder.name, dirs_exist_ok=True)
