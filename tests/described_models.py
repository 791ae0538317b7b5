"""Describe models from a folder or model name and settings."""

from latentcache.encoders.vae.describe import describe_model
from latentcache.fields.latents import LatentsSettings


def described_model(model, *, on_cuda=False, **settings):
    return describe_model(LatentsSettings(model=str(model), **settings), on_cuda=on_cuda)
