"""Lightning on token views: every batch of every epoch, and a resume in the middle of one."""

import lightning
import pytest
import torch
from tiny_tokens import LENGTH, build_fifty, tiny_llama

from latentcache import open_cache

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    return open_cache(build_fifty(tmp_path_factory.mktemp("lightning")) / "texts.latentcache").rows(pack=LENGTH)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.seen = tiny_llama(), []

    def training_step(self, batch, number):
        self.seen.append(batch["input_ids"].tolist())
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(loader, folder, *, stop=None, resume=None):
    """Train two epochs, or until a checkpoint after so many steps."""
    module = Module()
    save = lightning.pytorch.callbacks.ModelCheckpoint(folder, "stop", every_n_train_steps=stop) if stop else None
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        max_steps=stop or -1,
        enable_checkpointing=bool(stop),
        callbacks=[save] if save else [],
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
    _, first = fit(loader, tmp_path, stop=len(loader) + 2)
    assert len(first.seen) == len(loader) + 2
    _, second = fit(view.loader(batch_size=2, format="transformers"), tmp_path, resume=tmp_path / "stop.ckpt")
    assert first.seen + second.seen == expected(view, 2)
