"""Functions that run on several ranks, each in its own process; results are JSON."""

import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from leave_at_once import leave
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from latentcache import open_cache
from latentcache.errors import UsageError

#: A rank that waits longer for another hangs.
PATIENCE = 60


def spawn(function, world_size, folder, *arguments):
    """Run ``function(rank, world_size, folder, *arguments)`` on every rank; return the results by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = (function, world_size, str(folder), port, *arguments)
    torch.multiprocessing.spawn(_rank, args=given, nprocs=world_size)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def _rank(rank, function, world_size, folder, port, *arguments):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = function(rank, world_size, *arguments)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(result))
    leave()


def step_of(batch):
    return {"shape": list(batch["latents"].shape), "names": batch["names"], "sum": float(batch["latents"].sum())}


def train_with_ddp(rank, world_size, cache, state, batch_size):
    """Train one epoch, or its rest from ``state``, with gradients averaged over ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=batch_size, seed=3, remainder="partial")
    assert f"rank {rank} of {world_size} (torch.distributed)" in repr(loader)
    if state:
        loader.load_state_dict(state)
    loader.set_epoch(2)
    model = DistributedDataParallel(torch.nn.Conv2d(4, 4, 3, padding=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps, states = [], []
    for batch in loader:
        model(batch["latents"]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step_of(batch))
        states.append(loader.state_dict())
    weights = [float(value) for value in model.module.weight.flatten()]
    dist.destroy_process_group()
    return {"length": len(loader), "steps": steps, "states": states, "weights": weights}


class Denoiser(torch.nn.Module):
    """A model of one layer that records its batches."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Conv2d(4, 4, 1), []

    def forward(self, latents, names, **rest):
        self.seen.append({"shape": list(latents.shape), "names": names})
        return {"loss": self.layer(latents).pow(2).mean()}


def train_with_trainer(rank, world_size, cache, folder):
    """Run :func:`trained` for the loader and for a ``DataLoader`` around it."""
    ways = {"loader": False, "DataLoader": True}
    return {name: trained(world_size, cache, around, folder) for name, around in ways.items()}


def trained(world_size, cache, in_data_loader, folder):
    """Train two epochs with the Trainer of transformers; return its batches and its log."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=2, seed=3)  # from the environment
    batches = DataLoader(loader, batch_size=None) if in_data_loader else loader
    model, epochs = Denoiser(), []

    class Progress(TrainerCallback):
        def on_epoch_begin(self, args, state, control, train_dataloader=None, **rest):
            if in_data_loader:  # as on the page; the Trainer passes it to the loader
                train_dataloader.dataset.set_epoch(int(state.epoch or 0))

        def on_step_end(self, args, state, control, **rest):
            epochs.append(state.epoch)

    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "ddp_backend": "gloo"}
    arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=2, num_train_epochs=2, **quiet)
    trainer = Trainer(model, arguments, callbacks=[Progress()])
    trainer.get_train_dataloader = lambda: batches
    assert trainer.args.world_size == world_size
    trainer.train()
    weights = [float(value) for value in model.layer.weight.detach().flatten()]
    counted = {"steps": trainer.state.global_step, "max_steps": trainer.state.max_steps, "epochs": epochs}
    return counted | {"seen": model.seen, "length": len(loader), "weights": weights}


def use_accelerate(rank, world_size, cache):
    """Use the loader beside ``prepare``, inside it, and in a prepared ``DataLoader``."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, world_size)
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=2)
    beside = [step_of(batch) for batch in loader]
    model = torch.nn.Conv2d(4, 4, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    given = []
    for batch in prepared:
        accelerator.backward(model(batch["latents"]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        given.append(step_of(batch))
    batches = DataLoader(loader, batch_size=None)
    own = {"sampler": loader.sampler, "batch_size": None}
    started = DataLoader(loader.dataset, **own, num_workers=2, multiprocessing_context="spawn")
    errors = {"map": _error_of(accelerator, DataLoader(loader, batch_size=None))}
    errors |= {"dispatched": _error_of(accelerator, batches), "sampler": _error_of(accelerator, started)}
    accelerator.dataloader_config = DataLoaderConfiguration(dispatch_batches=False)
    errors |= {"sharded": _error_of(accelerator, batches)}
    workers = [step_of(batch) for batch in started]
    unprepared = [step_of(batch) for batch in batches]
    found = {"beside": beside, "given": given, "unprepared": unprepared, "workers": workers}
    return found | {"same": prepared is loader, "errors": errors}


def _error_of(accelerator, batches):
    """Return type and text of the error of prepared ``batches``; empty without an error."""
    try:
        for _ in accelerator.prepare(batches):
            pass
    except (UsageError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return []
