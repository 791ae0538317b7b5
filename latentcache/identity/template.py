"""What a chat template is: its text, with the clock stopped that some templates read, and the hash of that.

Pure: text in, text out; nothing is rendered, and no template library is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date

from latentcache.errors import UsageError
from latentcache.identity.content import content_hash

#: What a template asks for the day by; also the name of the option that gives it, as ``2024-07-26``.
CLOCK = "strftime_now"
_FORMATS = re.compile(rf"{CLOCK}\(\s*(['\"])(.*?)\1\s*\)")


def pin_clock(template: str, day: date) -> str:
    """A template that asks for the day gets one that is fixed, as else every day would give other ids.

    Raises:
        UsageError: It asks in a way that cannot be answered beforehand.
    """
    if CLOCK not in template:
        return template
    formats = dict.fromkeys(found for _, found in _FORMATS.findall(template))
    if not formats:
        raise UsageError(
            "the chat template reads the clock in a way that cannot be pinned",
            why=f"expected {CLOCK} with a format between quotes",
            fix="write the date into the template and give it with --chat-template FILE",
        )
    answers = "".join(
        f"{{%- if format == {json.dumps(form)} -%}}{day.strftime(form)}{{%- endif -%}}" for form in formats
    )
    # A macro of this name comes before the global one.
    return f"{{%- macro {CLOCK}(format) -%}}{answers}{{%- endmacro -%}}{template}"


def template_hash(template: str, options: Mapping[str, str]) -> str:
    """Hex hash of a template as a recipe has it; empty without a template.

    Args:
        template: As the tokenizer has it, its clock running.
        options: Name -> JSON of what a recipe's template is given; the day is among them where it is asked for.

    Raises:
        UsageError: The template reads the clock in a way that cannot be answered beforehand.
        ValueError: The day is none.
    """
    if CLOCK in template and CLOCK in options:
        template = pin_clock(template, date.fromisoformat(str(json.loads(options[CLOCK]))))
    return content_hash(template.encode()).hex() if template else ""
