"""Two steps of a LoRA by the training script of sd-scripts: python train_sd_scripts.py CHECKOUT TOML OUT TOKENIZERS.

``sdxl_train_network.py`` as it is, but for its model: a UNet of SDXL in bfloat16 with random weights, and a VAE and
text encoders that are an error if used. Writes a line of JSON to stdout: the loss of each step.
"""

import json
import sys

import standins
import torch


class Refused(torch.nn.Module):
    """A model that must not be used; the trainer prints the type of its third parameter."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(1) for _ in range(3))

    def forward(self, *_, **__):
        raise AssertionError("the trainer encodes again")

    encode = decode = forward


def random_unet():
    """The denoiser of SDXL: 2.6 billion weights, 5 GB."""
    from library import sdxl_original_unet

    with torch.device("meta"):
        unet = sdxl_original_unet.SdxlUNet2DConditionModel().to(torch.bfloat16)
    unet.to_empty(device="cpu")
    torch.manual_seed(0)
    for name, weights in unet.named_parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.02)
        else:
            torch.nn.init.constant_(weights, float(name.endswith("weight")))
    return unet


def main():
    checkout, config, out, tokenizers = sys.argv[1:]
    standins.install(checkout)
    import sdxl_train_network
    from library import sdxl_model_util, train_util

    losses = []

    class Trainer(sdxl_train_network.SdxlNetworkTrainer):
        def load_target_model(self, args, weight_dtype, accelerator):
            self.load_stable_diffusion_format, self.logit_scale, self.ckpt_info = False, None, None
            return sdxl_model_util.MODEL_VERSION_SDXL_BASE_V1_0, [Refused(), Refused()], Refused(), random_unet()

        def process_batch(self, *arguments, **options):
            loss = super().process_batch(*arguments, **options)
            losses.append(float(loss))
            return loss

    words = (
        f"--dataset_config {config} --output_dir {out} --output_name lora --tokenizer_cache_dir {tokenizers}"
        " --pretrained_model_name_or_path random --network_module networks.lora --network_dim 2"
        " --cache_latents --cache_latents_to_disk --cache_text_encoder_outputs --cache_text_encoder_outputs_to_disk"
        " --network_train_unet_only --mixed_precision bf16 --max_train_steps 2 --max_data_loader_n_workers 0"
        " --learning_rate 1e-3 --seed 0 --sdpa --no_half_vae --save_model_as safetensors"
    )
    args = sdxl_train_network.setup_parser().parse_args(words.split())
    train_util.verify_command_line_training_args(args)
    Trainer().train(train_util.read_config_from_file(args, sdxl_train_network.setup_parser()))
    sys.stdout.write(json.dumps({"losses": losses}) + "\n")


main()
