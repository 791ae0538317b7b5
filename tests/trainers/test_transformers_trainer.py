"""The Trainer of transformers: total steps and epoch numbers are exact (LLaMA-Factory), and a resume is too."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from latentcache import open_cache

pytestmark = pytest.mark.filterwarnings("ignore")


class Denoiser(torch.nn.Module):
    """Remembers what it was trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(4, 4, 1)
        self.seen = []

    def forward(self, latents, keys, **rest):
        self.seen.append(keys)
        return {"loss": self.layer(latents).pow(2).mean()}


class Progress(TrainerCallback):
    """The epoch number after every optimizer step."""

    def __init__(self):
        self.epochs = []

    def on_step_end(self, args, state, control, **rest):
        self.epochs.append(state.epoch)


def order(loader, epochs):
    """The batches of the first epochs, each in its own order."""
    batches = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches += [batch["keys"] for batch in loader]
    return batches


def train(loader, folder, grad_accum, epochs):
    class CacheTrainer(Trainer):
        def get_train_dataloader(self):
            return loader

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=grad_accum,
        num_train_epochs=epochs,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    progress, model = Progress(), Denoiser()
    trainer = CacheTrainer(model, arguments, callbacks=[progress])
    trainer.train()
    return trainer, progress, model


@pytest.mark.parametrize("grad_accum", [1, 3, 4, 8, 20])
def test_steps_and_epochs_are_exact(thirteen, tmp_path, grad_accum):
    """Seven batches an epoch; fails where the length is an estimate or the last partial accumulation is forgotten."""
    loader = open_cache(thirteen / "pictures.latentcache").loader(batch_size=2, dtype=torch.float32)
    assert len(loader) == 7
    trainer, progress, model = train(loader, tmp_path, grad_accum, epochs=2)
    steps = loader.steps(2, grad_accum)
    assert (trainer.state.global_step, trainer.state.max_steps) == (steps, steps)
    assert progress.epochs == pytest.approx([loader.epoch_at(step, grad_accum) for step in range(1, steps + 1)])
    assert progress.epochs[-1] == 2
    assert model.seen == order(loader, 2)


def test_epochs_have_orders_of_their_own(thirteen):
    loader = open_cache(thirteen / "pictures.latentcache").loader(batch_size=2)
    both = order(loader, 2)
    assert both[:7] != both[7:]


def test_the_page_and_its_resume(at_hand, run_howto):
    names = run_howto("train-with-transformers-trainer")
    loader, seen = names["loader"], []

    def forward(self, latents, keys, **rest):
        seen.append(keys)
        return {"loss": self.layer(latents).pow(2).mean()}

    names["Denoiser"].forward = forward
    trainer = names["resuming_trainer"](disable_tqdm=True)
    trainer.train(resume_from_checkpoint="checkpoints/checkpoint-5")
    assert trainer.state.global_step == loader.steps(2)
    assert trainer.state.epoch == 2
    assert seen == order(loader, 2)[5:]
