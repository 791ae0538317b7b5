import subprocess
import sys

from latentcache.encoders.text.opening import open_tokenizer
from latentcache.encoders.text.stub import StubTokenizer, stub_description


def test_the_stub_opens():
    assert isinstance(open_tokenizer(stub_description()), StubTokenizer)


def test_the_stub_needs_no_library():
    code = (
        "import sys\n"
        "from latentcache.encoders.text.opening import open_tokenizer\n"
        "from latentcache.encoders.text.stub import stub_description\n"
        "open_tokenizer(stub_description())\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'tiktoken', 'jinja2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
