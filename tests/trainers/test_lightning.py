"""Lightning: epochs have different orders, none is empty, and resume inside an epoch is exact."""

import pytest
from thirteen_images import order

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def page(working_folder, run_howto, monkeypatch):
    """The namespace of the page, with a model that records its batches."""
    names = run_howto("pytorch", "Lightning")
    training_step, seen = names["Denoiser"].training_step, []

    def remember(self, batch, index):
        seen.append(batch["names"])
        return training_step(self, batch, index)

    monkeypatch.setattr(names["Denoiser"], "training_step", remember)
    return names, seen


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def test_the_page_trains_two_whole_epochs_of_different_order(page):
    """Fails if a loader resets itself after its last batch: epoch 1 would be empty."""
    names, seen = page
    names["loader"].set_epoch(0)
    trainer = names["fit"](enable_checkpointing=False, **QUIET)
    expected = order(names["loader"], 2)
    assert seen == expected
    assert expected[:7] != expected[7:]
    assert trainer.current_epoch == 2


@pytest.mark.parametrize("stop", [3, 7, 10])
def test_a_stopped_run_resumes_with_the_next_batch(page, working_folder, stop):
    """Stop inside the first epoch, at its end, and in the second one."""
    names, seen = page
    import lightning

    callback = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=working_folder, filename="stop", every_n_train_steps=stop
    )
    names["loader"].set_epoch(0)
    names["fit"](max_steps=stop, callbacks=[callback], **QUIET)
    assert len(seen) == stop
    fresh = names["cache"].read(dtype=names["torch"].float32).loader(batch_size=2, seed=0)
    names["loader"] = fresh
    trainer = names["fit"](str(working_folder / "stop.ckpt"), enable_checkpointing=False, **QUIET)
    assert trainer.global_step == 14
    assert seen == order(fresh, 2)
