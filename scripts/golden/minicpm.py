"""A small MiniCPM-V 4.6 model in the layout of transformers, its training curves and losses by transformers and
PyTorch, and tables of slices.

  python scripts/golden/minicpm.py            # models/small-minicpm and its entries of the files below
  python scripts/golden/minicpm.py --check    # draws the weights again and compares them

Entries of `curves.json` and `losses_at_init.json` with the data `text` and `image_exact`; `ref_trainer.py
--check-curves` and `check_golden.py` recompute them. minicpm_4x.json has the same, with 8 steps, of the model with
`downsample_mode` 4x in config.json and both files of the processor, without the layers that it does not use then.

config.json is what transformers 5 saves and has the keys of the published file, as have preprocessor_config.json
(flat) and processor_config.json (nested). Tokenizer and special tokens are those of small-qwen35 and six more. The
processor scales every image: a slice has about 112 x 112 pixels, of which the model makes about 4 tokens.
"""

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from adapters import curve
from make_variants import check_drawn, check_loads, drawn_tensors, save, write_json
from qwen2_vl import losses, write_results
from reference_lib import GOLDEN, IGNORE, Encoder, forward, load_model, media, read_jsonl

NAME, SEED = "small-minicpm", 53
FOLDER, QWEN35 = GOLDEN / "models" / NAME, GOLDEN / "models" / "small-qwen35"
DATA = ("text", "image_exact")
TOKENS = {  # the attributes of the tokenizer that the processor reads
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}
FIRST = 2043  # id of `<image>`; the others follow
# The position table has 10 x 10 rows, which most images have to shrink or to stretch. `layer_norm_eps` is not that of
# the merger, which is fixed. As in the published file, 8 does not divide the vocabulary, and there are no weights of
# the additional layer that `mtp_num_hidden_layers` mentions.
CONFIG = {
    "architectures": ["MiniCPMV4_6ForConditionalGeneration"], "downsample_mode": "16x",
    "drop_vision_last_layer": False, "eos_token_id": 2017, "image_size": 1120, "image_token_id": 2029,
    "insert_layer_id": 1, "merge_kernel_size": [2, 2], "merger_times": 1, "model_type": "minicpmv4_6",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "full_attention_interval": 4,
        "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_value_head_dim": 32, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4, "num_hidden_layers": 4,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
        "tie_word_embeddings": True, "use_cache": True, "vocab_size": 2054,
    },
    "tie_word_embeddings": True, "video_token_id": 2030,
    "vision_config": {
        "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32, "image_size": 140,
        "insert_layer_id": 1, "intermediate_size": 56, "layer_norm_eps": 1e-04, "model_type": "minicpmv4_6_vision",
        "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 4, "patch_size": 14,
        "window_kernel_size": [2, 2],
    },
}
IMAGE_PROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "downsample_mode": "16x",
    "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "MiniCPMV4_6ImageProcessor", "image_std": [0.5, 0.5, 0.5],
    "max_slice_nums": 9, "patch_size": 14, "resample": 3, "rescale_factor": 0.00392156862745098,
    "scale_resolution": 112, "slice_mode": True, "use_image_id": True,
}
VIDEO_PROCESSOR = {k: v for k, v in IMAGE_PROCESSOR.items() if k != "image_processor_type"} | {
    "do_sample_frames": True, "max_num_frames": 128, "return_metadata": False, "stack_frames": 1,
    "video_processor_type": "MiniCPMV4_6VideoProcessor",
}
GENERATION = {
    "bos_token_id": 2018, "do_sample": True, "eos_token_id": [2017, 2019], "repetition_penalty": 1.0,
    "temperature": 0.7, "top_k": 0, "top_p": 1.0,
}
# Complete gradients of these are stored.
GRADIENTS = ["model.vision_tower.embeddings.position_embedding.weight"] + [
    f"model.{name}"
    for part in ("vision_tower.vit_merger", "merger.mlp.0") for name in (f"{part}.pre_norm.weight", f"{part}.linear_1.bias")
] + ["model.vision_tower.vit_merger.layer_norm1.weight", "model.vision_tower.post_layernorm.weight"]
# Replaces the beginning and the end of small-qwen35's template, which writes the turns.
TEMPLATE_BEGIN = """\
{#- Hand-written stand-in for the chat template of MiniCPM-V 4.6: same rendered text, not the same source. -#}
{%- macro show(content, count, in_system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- elif content is mapping or content is not iterable %}
        {{- raise_exception('Unexpected content type.') }}
    {%- else %}
        {%- set shown = namespace(parts=[]) %}
        {%- for part in content %}
            {%- set pad = '' %}
            {%- if 'image' in part or 'image_url' in part or part.type == 'image' %}
                {%- set pad = '<|image_pad|>' %}
            {%- elif 'video' in part or part.type == 'video' %}
                {%- set pad = '<|video_pad|>' %}
            {%- elif 'text' not in part %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
            {%- if pad and in_system %}{{- raise_exception('System message cannot contain media.') }}{% endif %}
            {%- set shown.parts = shown.parts + [pad or part.text] %}
        {%- endfor %}
        {{- shown.parts | join('\\n') }}
    {%- endif %}
{%- endmacro %}
"""
TEMPLATE_END = """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if not enable_thinking %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


def write_tokenizer():
    """small-qwen35's tokenizer with the tokens around images, and the template."""
    tokenizer = json.loads((QWEN35 / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((QWEN35 / "tokenizer_config.json").read_text(encoding="utf-8"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    for number, token in enumerate(list(TOKENS.values())[2:], FIRST):
        tokenizer["added_tokens"].append({"id": number, "content": token} | flags)
        settings["added_tokens_decoder"][str(number)] = {"content": token} | flags
    del settings["chat_template"], settings["additional_special_tokens"]
    settings |= {"bos_token": "<|im_start|>", "extra_special_tokens": TOKENS, "processor_class": "MiniCPMV4_6Processor"}
    write_json(FOLDER / "tokenizer.json", tokenizer, indent=None)
    write_json(FOLDER / "tokenizer_config.json", settings)
    turns = (QWEN35 / "chat_template.jinja").read_text(encoding="utf-8")
    turns = turns[turns.index("{%- macro call_block") : turns.index("{%- if add_generation_prompt %}")]
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE_BEGIN + turns + TEMPLATE_END, encoding="utf-8")


def write_settings(folder, mode):
    """The files that contain `downsample_mode`."""
    config = AutoConfig.for_model(**CONFIG | {"downsample_mode": mode}, dtype="float32")
    config.save_pretrained(folder)
    images, videos = ({**settings, "downsample_mode": mode} for settings in (IMAGE_PROCESSOR, VIDEO_PROCESSOR))
    owner = {"processor_class": "MiniCPMV4_6Processor"}
    write_json(folder / "preprocessor_config.json", images | owner)
    write_json(folder / "processor_config.json", {"image_processor": images, **owner, "video_processor": videos})


def adjust(model):
    """Makes the states of the decoder and the eps of the merger matter, and keeps the decoder's sums moderate."""
    generator = torch.Generator().manual_seed(SEED + 1)
    with torch.no_grad():
        for tensor in model.model.vision_tower.post_layernorm.parameters():
            tensor.mul_(0.05)
        for module in model.modules():
            if type(module).__name__ == "Qwen3_5RMSNorm":  # adds 1 to its weight
                module.weight.sub_(1)
            if not hasattr(module, "in_proj_qkv"):
                continue
            heads = module.num_v_heads
            module.A_log.copy_((0.01 + 15.99 * torch.rand(heads, generator=generator)).log())
            # Every second head forgets slowly.
            step = torch.exp(math.log(0.002) + math.log(25.0) * torch.rand(heads, generator=generator))
            slow = torch.log(torch.expm1(step))
            module.dt_bias.copy_(torch.where(torch.arange(heads) % 2 == 0, torch.ones(heads), slow))
            # With independent queries and keys, outputs of nearly no length are normalised, and rounding errors grow.
            qkv, taps, width = module.in_proj_qkv.weight, module.conv1d.weight, module.key_dim
            qkv[width : 2 * width] = 0.95 * qkv[:width] + 0.31 * qkv[width : 2 * width]
            qkv[2 * width :] *= 3
            taps.mul_(0.4)
            taps[..., -1].add_(1.0)


def make_folder():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_settings(FOLDER, "16x")
    write_json(FOLDER / "generation_config.json", GENERATION)
    write_tokenizer()
    save(drawn_tensors(FOLDER, SEED, adjust), FOLDER)
    check_loads(FOLDER)


def features(folder, mode):
    """Features of single rows, and gradients of the first step of the curve of `image_exact`, as `mode/..`."""
    encoder, model = Encoder(folder, GOLDEN / "data"), load_model(folder)
    samples = [encoder(row) for row in read_jsonl(GOLDEN / "data" / "image_exact.jsonl")[:8]]
    num_targets = sum(label != IGNORE for sample in samples for label in sample["labels"][1:])
    found = {}
    for sample in samples:
        given = media(encoder.config, None, sample["pixel_values"], torch.tensor(sample["grid"]))
        with torch.no_grad():
            found[f"{mode}/features/{sample['id']}"] = torch.cat(model.get_image_features(**given).pooler_output)
        ((loss, _),) = forward(model, encoder.config, [sample])
        (loss / num_targets).backward()
    gradients = {name: model.get_parameter(name).grad for name in GRADIENTS}
    return found | {f"{mode}/gradients/{n}": gradient for n, gradient in gradients.items() if gradient is not None}


def write_more():
    """minicpm_4x.json and minicpm.safetensors."""
    tensors = features(FOLDER, "16x")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder) / NAME
        shutil.copytree(FOLDER, folder)
        write_settings(folder, "4x")
        tensors |= features(folder, "4x")
        golden = {"losses": losses(folder, "image_exact"), "curve": curve("image_exact", ["--steps", "8"], folder)}
    save_file(tensors, GOLDEN / "minicpm.safetensors", metadata={"format": "pt"})
    for key in ("grad_norms_step1", "param_norms_final"):
        golden["curve"][key] = {n: norm for n, norm in golden["curve"][key].items() if ".vit_merger." not in n}
    print("4x", golden["curve"]["loss"][0], golden["curve"]["loss"][-1])
    write_json(GOLDEN / "minicpm_4x.json", golden, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the weights with the stored ones")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.check:
        check_drawn(FOLDER, SEED, adjust)
        return
    make_folder()
    write_results(NAME, DATA)
    write_more()


if __name__ == "__main__":
    main()
