"""Megatron core, datatrove, mosaicml-streaming and webdataset read the exported files.

These libraries pin other versions, so they are not installed here. ``LATENTCACHE_READERS`` lists folders that
contain them, separated by colons; ``readers.txt`` has those of whole samples.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from made_documents import export
from test_mds import Rows
from test_mds import export as export_mds
from test_shards import READERS as OWN_READERS
from test_shards import change, code_of, images

from latentcache.export.tokens import FILES

__all__ = ["images"]
READERS = os.environ.get("LATENTCACHE_READERS", "")
DOCUMENTS = [[number % 251] * (number % 13 + 1) for number in range(40)]
WIDE = [[number * 2000 + token for token in range(number % 5 + 1)] for number in range(1, 40)]
#: Stand-ins for torchvision, which mosaicml-streaming imports for images.
TORCHVISION = """
import importlib.machinery, types
def anything(name):
    if name.startswith('__'):
        raise AttributeError(name)
    return type(name, (), {})
for name in ('', '.datasets', '.datasets.folder', '.transforms', '.transforms.functional'):
    stub = types.ModuleType('torchvision' + name)
    stub.__path__, stub.__spec__ = [], importlib.machinery.ModuleSpec('torchvision' + name, None)
    stub.__getattr__ = anything
    sys.modules['torchvision' + name] = stub
"""
#: Prints documents or rows as JSON; arguments: folder, bytes per id.
PROGRAMS = {
    "megatron": """
from megatron.core.datasets.indexed_dataset import IndexedDataset
dataset = IndexedDataset(sys.argv[1] + '/train')
first = dataset.document_indices.tolist()
print(json.dumps([[int(i) for s in range(a, b) for i in dataset[s]] for a, b in zip(first, first[1:])]))
""",
    "datatrove": """
import numpy
from datatrove.pipeline.tokens.merger import get_data_reader, load_doc_ends
from datatrove.utils.dataset import DatatroveFolderDataset
file, width = sys.argv[1] + '/train/00000_tokens.ds', int(sys.argv[2])
ends = load_doc_ends(open(file + '.index', 'rb'))
reader = get_data_reader(open(file, 'rb'), ends, nb_bytes=width)
documents = [numpy.frombuffer(ids, 'u%d' % width).tolist() for ids in reader]
windows = DatatroveFolderDataset(sys.argv[1] + '/train', seq_len=7, token_size=width)
string = [token for document in documents for token in document]
assert [windows[i]['input_ids'].tolist() for i in range(len(windows))] == [
    string[at : at + 8] for at in range(0, len(string) - 7, 8)]
print(json.dumps(documents))
""",
    "mds": TORCHVISION
    + """
from streaming import MDSWriter, StreamingDataset
from pathlib import Path
dataset = StreamingDataset(local=sys.argv[1], split='train', shuffle=False, batch_size=1)
rows = [dataset[number]['tokens'] for number in range(len(dataset))]
kind = rows[0].dtype.name
with MDSWriter(out=sys.argv[1] + '/again', columns={'tokens': 'ndarray:' + kind}) as writer:
    for row in rows:
        writer.write({'tokens': row})
for name in ('index.json', 'shard.00000.mds'):
    assert Path(sys.argv[1], 'train', name).read_bytes() == Path(sys.argv[1], 'again', name).read_bytes(), name
print(json.dumps([row.tolist() for row in rows]))
""",
}


def ran(code, *arguments, folder=None):
    """Run Python with the libraries; return the JSON value of its last line."""
    environment = os.environ | {"PYTHONPATH": READERS}
    words = [sys.executable, "-W", "ignore", "-c", f"import json, sys\n{code}", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read(form, folder, width):
    return ran(PROGRAMS[form], folder, width)


def read_by_readme(form, folder):
    """Run the code of the README; return (tensors as lists, about) of each sample."""
    code = code_of(folder).rstrip()
    indent = re.search(r"\n( *).*\Z", code)[1]
    lists = "{name: [str(v.dtype).split('.')[-1], v.tolist()] for name, v in sample.items()}"
    shown = f"samples = []\n{code}\n{indent}samples.append([{lists}, about])\nprint(json.dumps(samples))"
    return ran(f"{TORCHVISION if form == 'mds' else ''}{shown}", folder=folder)


if READERS:  # without them there is nothing to skip

    @pytest.mark.slow
    @pytest.mark.parametrize("ids", [DOCUMENTS, WIDE])
    @pytest.mark.parametrize("form", FILES)
    def test_documents_are_read(tmp_path, form, ids):
        num_ids = 300 if ids is DOCUMENTS else 100_000
        export(form, ids, tmp_path / "out", num_ids)
        assert read(form, tmp_path / "out", 2 if ids is DOCUMENTS else 4) == ids

    @pytest.mark.slow
    @pytest.mark.parametrize("ids", [DOCUMENTS, WIDE])
    def test_rows_are_read_and_written_as_by_the_library(tmp_path, ids):
        rows, num_ids = [document for document in ids if len(document) > 1], 300 if ids is DOCUMENTS else 100_000
        export_mds({"train": Rows(rows, 16)}, tmp_path / "out", num_ids)
        assert read("mds", tmp_path / "out", 0) == rows

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["webdataset", "mds"])
    def test_the_readme_reads_whole_samples(run, images, form, monkeypatch):
        change(monkeypatch, form, shard_bytes=14_000)
        _, cache, out = images
        assert run("export", cache, out, "--to", form).status == 0
        expected = [
            [{name: [str(values.dtype).split(".")[-1], values.tolist()] for name, values in tensors.items()}, about]
            for tensors, about in OWN_READERS[form](out, monkeypatch)
        ]
        assert read_by_readme(form, out) == expected
