"""Describe models from a folder or model name and settings."""

import json

from latentcache.encoders.vae.describe import describe_model
from latentcache.fields.latents import LatentsSettings
from latentcache.fields.protocol import DescribeContext


def described_model(model, *, device="cpu", **settings):
    return describe_model(LatentsSettings(model=str(model), **settings), DescribeContext(device=device))


def as_cached(described):
    """Read the recipe and provenance of a build back from a manifest, for ``DescribeContext``."""
    recipe = type(described.recipe).from_json(json.loads(json.dumps(described.recipe.as_json())))
    return {"recipe": recipe, "provenance": json.loads(json.dumps(described.provenance))}
