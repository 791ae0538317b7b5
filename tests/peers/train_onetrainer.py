"""Train with OneTrainer's own trainer: python train_onetrainer.py ONETRAINER MGDS OUT MODEL WORK EPOCHS.

Run in an interpreter of its own, on a CPU. The VAE and the text encoders of MODEL fail if they are used. Packages
that this does not need, but that its modules import, are stand-ins. Writes a line of JSON to stdout: steps, losses.
"""

import json
import os
import sys
from unittest.mock import MagicMock

from serve_onetrainer import install


def main():
    trainer, mgds, out, model, work, epochs = sys.argv[1:]
    import diffusers
    import torch
    import transformers

    install(trainer, mgds)
    sys.modules["modules.util.triton_mm_8bit"] = MagicMock()  # kernels for a GPU
    os.chdir(trainer)  # it finds its modules from there
    from modules.trainer.GenericTrainer import GenericTrainer
    from modules.util.callbacks.TrainCallbacks import TrainCallbacks
    from modules.util.commands.TrainCommands import TrainCommands
    from modules.util.config.TrainConfig import TrainConfig

    def refuse(*_, **__):
        raise AssertionError("the trainer encodes again")

    transformers.CLIPTextModel.text_model = property(lambda model: model)  # as in its release of transformers
    diffusers.AutoencoderKL.encode = refuse
    transformers.CLIPTextModel.forward = transformers.CLIPTextModelWithProjection.forward = refuse
    values = {
        "__version": 11, "concept_file_name": f"{out}/concepts.json", "cache_dir": f"{out}/cache",
        "workspace_dir": work, "output_model_destination": f"{work}/model.safetensors", "debug_dir": f"{work}/debug",
        "clear_cache_before_training": False, "tensorboard": False, "train_device": "cpu", "temp_device": "cpu",
        "dataloader_threads": 1, "base_model_name": model, "model_type": "STABLE_DIFFUSION_XL_10_BASE",
        "training_method": "FINE_TUNE", "resolution": "256", "batch_size": 2, "epochs": int(epochs),
        "train_dtype": "FLOAT_32", "sample_definition_file_name": f"{work}/samples.json", "samples": [],
        "text_encoder": {"train": False, "weight_dtype": "FLOAT_32"},
        "text_encoder_2": {"train": False, "weight_dtype": "FLOAT_32"},
        "unet": {"train": True, "weight_dtype": "FLOAT_32", "gradient_checkpointing": False},
        "vae": {"weight_dtype": "FLOAT_32"}, "sample_after_unit": "NEVER", "backup_after_unit": "NEVER",
        "save_every_unit": "NEVER", "compile": False, "optimizer": {"optimizer": "ADAMW"}, "gc_after_unit": "NEVER",
    }  # fmt: skip
    config = TrainConfig.default_values().from_dict(values)
    losses = []
    run = GenericTrainer(config, TrainCallbacks(), TrainCommands())
    run.tensorboard = MagicMock(add_scalar=lambda name, value, step: losses.append([name, float(value), step]))
    run.start()
    run.train()
    steps = [value for name, value, _ in losses if name == "loss/train_step"]
    sys.stdout.write("\n" + json.dumps({"steps": run.model.train_progress.global_step, "losses": steps}) + "\n")
    assert all(torch.isfinite(torch.tensor(steps)))


if __name__ == "__main__":
    main()
