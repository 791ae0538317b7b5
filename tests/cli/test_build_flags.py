from typing import get_type_hints

from latentcache.cli import build_flags
from latentcache.cli.build import build


def test_build_has_each_of_them_with_a_word_of_help():
    aliases = {name: alias for name, alias in vars(build_flags).items() if hasattr(alias, "__metadata__")}
    hints = get_type_hints(build.__wrapped__.__wrapped__, include_extras=True).values()
    assert len(aliases) >= 12
    for name, alias in aliases.items():
        assert alias in hints, name
        assert alias.__metadata__[0].help, name
