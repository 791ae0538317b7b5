"""Lightning on token views: every batch of every epoch, and a resume in the middle of one."""

import lightning
import pytest
import torch
from tiny_tokens import LENGTH, build_fifty, tiny_llama

from latentcache import open_tokens

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    return open_tokens(build_fifty(tmp_path_factory.mktemp("lightning")) / "texts.latentcache").packed(LENGTH)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.seen = tiny_llama(), []

    def training_step(self, batch, number):
        self.seen.append(batch["input_ids"].tolist())
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(loader, folder, *, epochs=2, max_steps=-1, resume=None):
    module = Module()
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        **settings, max_epochs=epochs, max_steps=max_steps, default_root_dir=folder, enable_checkpointing=False
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer, module


def expected(view, epochs):
    loader, batches = view.loader(batch_size=2), []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches += [batch["input_ids"].tolist() for batch in loader]
    return batches


def test_epochs_are_whole_and_differ(view, tmp_path):
    loader = view.loader(batch_size=2, format="transformers")
    trainer, module = fit(loader, tmp_path)
    assert trainer.global_step == loader.steps(2)
    assert module.seen == expected(view, 2)
    assert module.seen[: len(loader)] != module.seen[len(loader) :]


def test_a_resume_in_the_middle_serves_the_rest(view, tmp_path):
    loader = view.loader(batch_size=2, format="transformers")
    stop = len(loader) + 2
    trainer, first = fit(loader, tmp_path, max_steps=stop)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    _, second = fit(view.loader(batch_size=2, format="transformers"), tmp_path, resume=tmp_path / "middle.ckpt")
    assert first.seen + second.seen == expected(view, 2)
