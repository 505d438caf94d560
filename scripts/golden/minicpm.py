"""A small MiniCPM-V 4.6 model in the layout of transformers, its training curves and losses by
transformers and PyTorch.

  python scripts/golden/minicpm.py            # models/small-minicpm, its entries of the files below
  python scripts/golden/minicpm.py --check    # draws the weights again and compares them

Entries of `curves.json` and `losses_at_init.json` with the data `text` and `image_exact`;
`ref_trainer.py --check-curves` and `check_golden.py` recompute them. minicpm_4x.json has the same
of the images, with 8 steps, of the model with `downsample_mode` 4x in config.json and both files of
the processor; without the layers that it does not use then.

config.json is what transformers 5 saves. preprocessor_config.json is flat and processor_config.json
nested, with the same settings. Tokenizer and special tokens are those of small-qwen35 and six more.
The processor scales every image: a slice has about 112 x 112 pixels, of which the model makes about
4 tokens.
"""

import argparse
import json
import math
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig

from adapters import curve
from make_variants import check_drawn, check_loads, couple, drawn_tensors, save, write_json
from minicpm_settings import (
    CONFIG, GENERATION, IMAGE_PROCESSOR, OWNER, TEMPLATE_BEGIN, TEMPLATE_END, TOKENS,
    VIDEO_PROCESSOR,
)
from qwen2_vl import losses, write_results
from reference_lib import GOLDEN

NAME, SEED = "small-minicpm", 53
FOLDER, QWEN35 = GOLDEN / "models" / NAME, GOLDEN / "models" / "small-qwen35"
DATA = ("text", "image_exact")
FIRST = 2043  # id of `<image>`; those of the other tokens around images follow


def write_tokenizer():
    """small-qwen35's tokenizer with the tokens around images, and the template."""
    tokenizer = json.loads((QWEN35 / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((QWEN35 / "tokenizer_config.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    flags["special"] = True
    for number, token in enumerate(list(TOKENS.values())[2:], FIRST):
        tokenizer["added_tokens"].append({"id": number, "content": token} | flags)
        settings["added_tokens_decoder"][str(number)] = {"content": token} | flags
    del settings["chat_template"], settings["additional_special_tokens"]
    settings |= {"bos_token": "<|im_start|>", "extra_special_tokens": TOKENS, **OWNER}
    write_json(FOLDER / "tokenizer.json", tokenizer, indent=None)
    write_json(FOLDER / "tokenizer_config.json", settings)
    turns = (QWEN35 / "chat_template.jinja").read_text(encoding="utf-8")
    begin, end = turns.index("{%- macro call_block"), turns.index("{%- if add_generation_prompt %}")
    template = TEMPLATE_BEGIN + turns[begin:end] + TEMPLATE_END
    (FOLDER / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_settings(folder, mode):
    """The files that contain `downsample_mode`."""
    AutoConfig.for_model(**CONFIG | {"downsample_mode": mode}).save_pretrained(folder)
    images, videos = ({**of, "downsample_mode": mode} for of in (IMAGE_PROCESSOR, VIDEO_PROCESSOR))
    write_json(folder / "preprocessor_config.json", images | OWNER)
    both = {"image_processor": images, **OWNER, "video_processor": videos}
    write_json(folder / "processor_config.json", both)


def adjust(model):
    """Makes the states of the decoder and the eps of the merger matter."""
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
            random = torch.rand(heads, generator=generator)
            slow = torch.log(torch.expm1(torch.exp(math.log(0.002) + math.log(25.0) * random)))
            module.dt_bias.copy_(torch.where(torch.arange(heads) % 2 == 0, torch.ones(heads), slow))
            couple(module)


def make_folder():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_settings(FOLDER, "16x")
    write_json(FOLDER / "generation_config.json", GENERATION)
    write_tokenizer()
    save(drawn_tensors(FOLDER, SEED, adjust), FOLDER)
    check_loads(FOLDER)


@contextmanager
def folder_with(mode):
    """A copy of the folder with another `downsample_mode`."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / NAME
        shutil.copytree(FOLDER, folder)
        write_settings(folder, mode)
        yield folder


def merged(old, new):
    """`old` where an object in `new` changes the keys that it has, and null removes a key."""
    if not isinstance(new, dict):
        return new
    both = dict(old or {})
    for key, value in new.items():
        both[key] = merged(both.get(key), value)
    return {key: value for key, value in both.items() if key not in new or value is not None}


@contextmanager
def changed_folder(*changes):
    """A copy of the folder with changed JSON files: each of `changes` maps files to changes."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / NAME
        shutil.copytree(FOLDER, folder)
        for name, new in (item for change in changes for item in change.items()):
            old = json.loads((folder / name).read_text(encoding="utf-8"))
            write_json(folder / name, merged(old, new))
        yield folder


def write_4x():
    """minicpm_4x.json."""
    with folder_with("4x") as folder:
        run = curve("image_exact", ["--steps", "8"], folder)
        golden = {"losses": losses(folder, "image_exact"), "curve": run}
    for key in ("grad_norms_step1", "param_norms_final"):
        run[key] = {name: norm for name, norm in run[key].items() if ".vit_merger." not in name}
    print("4x", run["loss"][0], run["loss"][-1])
    write_json(GOLDEN / "minicpm_4x.json", golden, indent=1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare weights with the stored")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.check:
        check_drawn(FOLDER, SEED, adjust)
        return
    make_folder()
    write_results(NAME, DATA)
    write_4x()


if __name__ == "__main__":
    main()
