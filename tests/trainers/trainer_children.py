"""``python trainer_children.py SYSTEM SETTINGS OUT``: train, and record the inputs of the model.

SYSTEM is llama-factory or axolotl. Interpreters with one of them run this without this package.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


class InputRecorder(transformers.TrainerCallback):
    """Records shapes and rows of every batch, and the Trainer's log."""

    def __init__(self):
        self.found = {"batches": [], "losses": []}

    def on_train_begin(self, args, state, control, model=None, **rest):
        def note(module, inputs, named):
            if module.training:
                given = {
                    name: value for name, value in named.items() if isinstance(value, torch.Tensor) and value.dim()
                }
                self.found["batches"].append(
                    {
                        name: {"shape": list(value.shape), "rows": value.tolist() if value.dim() == 2 else []}
                        for name, value in given.items()
                    }
                )

        model.register_forward_pre_hook(note, with_kwargs=True)

    def on_log(self, args, state, control, logs=None, **rest):
        self.found["losses"] += [logs["loss"]] if "loss" in logs else []

    def on_train_end(self, args, state, control, **rest):
        self.found |= {"steps": state.global_step, "max_steps": state.max_steps, "epoch": state.epoch}


def watched(watch):
    """Add ``watch`` to every Trainer of this process."""
    train = transformers.Trainer.train

    def train_and_tell(self, *args, **kwargs):
        self.add_callback(watch)
        return train(self, *args, **kwargs)

    transformers.Trainer.train = train_and_tell


def main(system, settings, out):
    watch = InputRecorder()
    watched(watch)
    if system == "llama-factory":
        from llamafactory.train.tuner import run_exp

        run_exp(json.loads(Path(settings).read_text()))
    else:
        from axolotl.cli.train import do_cli

        do_cli(settings)
    Path(out).write_text(json.dumps(watch.found))


if __name__ == "__main__":
    main(*sys.argv[1:])
