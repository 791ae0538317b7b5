"""A token cache of fifty texts, a tiny Llama for it, and the Trainer's log of steps and epochs."""

import json

import torch
from small_tokens import build
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

LENGTH = 64


def build_fifty(folder):
    """Create ``texts.jsonl`` and ``texts.latentcache``: fifty different texts of bytes."""
    lines = [json.dumps({"text": f"{number:02} " + "word " * (number % 11)}) for number in range(50)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    build(folder / "texts.jsonl", folder / "texts.latentcache")
    return folder


def tiny_llama(num_ids=512):
    torch.manual_seed(0)
    sizes = {"vocab_size": num_ids, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa"))


class Account(TrainerCallback):
    """Record the epochs of a Trainer, step by step."""

    def __init__(self):
        self.epochs = []

    def on_step_end(self, args, state, control, **rest):
        self.epochs.append(state.epoch)


def seen_llama():
    """A Llama that records its input ids in ``batches``."""
    model = tiny_llama()
    model.batches = []

    def note(module, args, inputs):
        if module.training:
            module.batches.append(inputs["input_ids"].tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return model


def a_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, "<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


_SETTINGS = {"per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "save_strategy": "no"}
_SETTINGS |= {"disable_tqdm": True, "logging_steps": 1000}


def arguments(folder, **more):
    return TrainingArguments(output_dir=str(folder), **(_SETTINGS | more))


def sft_config(folder, **more):
    from trl import SFTConfig

    fixed = {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False, "gradient_checkpointing": False}
    return SFTConfig(output_dir=str(folder), **(_SETTINGS | fixed | more))
