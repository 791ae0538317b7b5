"""Slow masks in child processes: 16 per unit of work, ``DELAY_MS`` for each."""

import os
import time

from latentcache.encoders.pixels import MaskProducer
from latentcache.fields.paired import Mask
from latentcache.fields.protocol import WorkSize

encode = MaskProducer.encode


def slow(self, batch):
    time.sleep(len(batch) * int(os.environ.get("DELAY_MS", "0")) / 1000)
    return encode(self, batch)


MaskProducer.encode, Mask.work = slow, WorkSize(unit_jobs=16)
