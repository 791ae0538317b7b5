import numpy as np
from PIL import Image

from latentcache.fields import registry
from latentcache.fields.protocol import Cached, DescribeContext, Failure, Job, Output, ProducerContext, Read
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, SampleTable


def test_a_kind_from_outside_is_found_and_works(tmp_path, monkeypatch):
    monkeypatch.setenv(registry.VARIABLE, "")
    registry.register(["tests.fields.edge_map:EdgeMap"])
    kind = registry.field_kind("edge_map")
    own = registry.field_kinds().keys() - {"edge_map"}
    assert {"latents", "input_ids", "prompt_embeds", "mask", "control"} < own < registry.field_kinds().keys()

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 80, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    names = Strings.of(["a.png"])
    content = np.zeros((1, 16), np.uint8)
    image = Input(content=content, file=np.zeros(1, np.int32))
    files = Files(names=names, stat=np.zeros((1, 6), np.uint64), content=content)
    samples = SampleTable(names=names, files=files, inputs={"image": image})

    described = registry.load(kind.describer)(kind.settings(edge_threshold=8), Cached(), DescribeContext())
    recipe = kind.recipe_from_json(described.recipe.as_json())
    assert recipe == described.recipe
    plan = kind.plan(samples, recipe)
    assert not plan.key.any()

    producer = registry.load(kind.producer)(described.producer, recipe, ProducerContext(root=str(tmp_path)))
    job = Job(sample=0, name="a.png", inputs={"image": {"path": "a.png"}}, outputs=(Output(item=0, group=0),))
    read = producer.prepare(job)
    assert isinstance(read, Read)
    (made,) = producer.encode(read.items).result()
    assert made.array.shape == (20, 8)
    assert made.array.dtype == np.uint8
    gone = producer.prepare(Job(sample=1, name="b.png", inputs={"image": {"path": "b.png"}}))
    assert isinstance(gone, Failure)
    assert gone.reason == "not-found"
    registry.field_kinds.cache_clear()
