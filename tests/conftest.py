"""Settings for all tests: property tests are judged by what they find, not by how busy the machine is."""

import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else every process of a test would ignore it, too

settings.register_profile("latentcache", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("latentcache")
