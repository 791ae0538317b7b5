"""The Trainer of transformers: exact total steps and epoch numbers, and exact resume."""

from collections import Counter

import pytest
import torch
from ranks import Denoiser, spawn, train_with_trainer
from thirteen_images import order
from tiny_tokens import Account, arguments
from transformers import Trainer

from latentcache import open_cache

pytestmark = pytest.mark.filterwarnings("ignore")


def train(loader, folder, grad_accum, epochs):
    settings = arguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=grad_accum, num_train_epochs=epochs
    )
    progress, model = Account(), Denoiser()
    trainer = Trainer(model, settings, callbacks=[progress])
    trainer.get_train_dataloader = lambda: loader
    trainer.train()
    return trainer, progress, model


@pytest.mark.parametrize("grad_accum", [1, 3, 20])
def test_steps_and_epochs_are_exact(thirteen, tmp_path, grad_accum):
    """Seven batches per epoch; fails for estimated lengths or a lost partial accumulation."""
    loader = open_cache(thirteen / "images.latentcache").read(dtype=torch.float32).loader(batch_size=2)
    assert len(loader) == 7
    trainer, progress, model = train(loader, tmp_path, grad_accum, epochs=2)
    steps = loader.steps(2, grad_accum)
    assert (trainer.state.global_step, trainer.state.max_steps) == (steps, steps)
    assert progress.epochs[-1] == 2
    assert [batch["names"] for batch in model.seen] == order(loader, 2)


@pytest.fixture(scope="module")
def two(thirteen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return spawn(train_with_trainer, 2, folder, str(thirteen / "images.latentcache"), str(folder / "out"))


@pytest.mark.parametrize("way", ["loader", "DataLoader"])
def test_two_processes_train_on_every_sample_and_count_exactly(thirteen, two, way):
    cache, ranks = str(thirteen / "images.latentcache"), [rank[way] for rank in two]
    expected = []
    for rank in range(2):
        loader = open_cache(cache).loader(batch_size=2, seed=3, rank=rank, world_size=2)
        expected.append([])
        for epoch in range(2):
            loader.set_epoch(epoch)
            expected[rank] += [batch["names"] for batch in loader]
    assert [[batch["names"] for batch in rank["seen"]] for rank in ranks] == expected
    steps = loader.steps(2)
    for rank in ranks:
        assert (rank["steps"], rank["max_steps"], rank["epochs"][-1]) == (steps, steps, 2)
        assert rank["epochs"] == pytest.approx([step / len(loader) for step in range(1, steps + 1)])
    for one, other in zip(*(rank["seen"] for rank in ranks), strict=True):
        assert one["shape"] == other["shape"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    each = len(loader)
    for epoch in range(2):
        served = Counter(
            name for rank in ranks for batch in rank["seen"][epoch * each :][:each] for name in batch["names"]
        )
        assert len(served) == 13
        assert sum(served.values()) == 13 + loader.report.samples_repeated


def test_the_page_and_its_resume(working_folder, run_howto):
    names = run_howto("pytorch", "Trainer of transformers")
    loader, seen = names["loader"], []

    def forward(self, latents, names, **rest):
        seen.append(names)
        return {"loss": self.layer(latents).pow(2).mean()}

    names["Denoiser"].forward = forward
    trainer = names["resuming_trainer"](disable_tqdm=True)
    trainer.train(resume_from_checkpoint="checkpoints/checkpoint-5")
    assert trainer.state.global_step == loader.steps(2)
    assert trainer.state.epoch == 2
    assert seen == order(loader, 2)[5:]
