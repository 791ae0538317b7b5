import subprocess
import sys

from latentcache.encoders.opening_tokens import open_tokeniser
from latentcache.encoders.stub_tokeniser import StubTokeniser, stub_description


def test_the_stub_opens():
    assert isinstance(open_tokeniser(stub_description()), StubTokeniser)


def test_the_stub_needs_no_library():
    code = (
        "import sys\n"
        "from latentcache.encoders.opening_tokens import open_tokeniser\n"
        "from latentcache.encoders.stub_tokeniser import stub_description\n"
        "open_tokeniser(stub_description())\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'tiktoken', 'jinja2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
