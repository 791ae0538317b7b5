import json
from datetime import date

import pytest

from latentcache.errors import UsageError
from latentcache.identity.content import content_hash
from latentcache.identity.template import CLOCK, pin_clock, template_hash

DAY = date(2024, 7, 26)


def test_a_clock_that_cannot_be_answered_beforehand_is_refused():
    with pytest.raises(UsageError, match="clock"):
        pin_clock("{{ strftime_now(form) }}", DAY)


def test_the_hash_is_that_of_the_pinned_template():
    template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    options = {CLOCK: json.dumps(DAY.isoformat())}
    assert template_hash(template, options) == content_hash(pin_clock(template, DAY).encode()).hex()
    assert template_hash(template, {CLOCK: '"2024-07-27"'}) != template_hash(template, options)
    assert template_hash("plain", options) == content_hash(b"plain").hex()
    assert template_hash("", options) == ""
