"""A small InternVL3.5 model in the layout of transformers, its training curves and losses by transformers and PyTorch,
and tables of tiles.

  python scripts/golden/internvl.py            # models/small-internvl, its entries of the files below, tiles.json
  python scripts/golden/internvl.py --check    # draws the weights and makes the tables again and compares them

Entries of `curves.json` and `losses_at_init.json` with the data `text` and `image_exact`; `ref_trainer.py
--check-curves` and `check_golden.py` recompute them. The processor enlarges most of these images: a tile has 112 x 112
pixels, of which the model makes 16 tokens. Tokenizer and special tokens are those of small-tied and four more.
config.json, preprocessor_config.json and processor_config.json have the keys of the published files, and
video_preprocessor_config.json is left out.

tiles.json has the grid and the number of tiles for sizes of images, and hashes of the patches of some images as in
resized.json, in the order of `reference_lib.patches`.
"""

import argparse
import json
import random
import shutil
from fractions import Fraction

import torch
from transformers import AutoImageProcessor
from transformers.models.got_ocr2.image_processing_got_ocr2 import (
    get_all_supported_aspect_ratios, get_optimal_tiled_canvas,
)

from make_variants import SMALL, check_drawn, check_loads, drawn_tensors, save, write_json
from qwen2_vl import in_order, write_results
from reference_lib import GOLDEN, patches
from resized import IMAGES, case, pixels

NAME, SEED = "small-internvl", 47
FOLDER = GOLDEN / "models" / NAME
TILES = GOLDEN / "tiles.json"
DATA = ("text", "image_exact")
SIDE = 112
TOKENS = {  # the attributes of the tokenizer that the processor reads
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
FIRST = 2043  # id of `<img>`; the others follow
CONFIG = {
    "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5, "image_seq_length": 16,
    "image_token_id": FIRST + 2, "model_type": "internvl", "projector_hidden_act": "gelu", "tie_word_embeddings": False,
    # heads * head_dim differs from hidden, as in the published 1B model
    "text_config": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2017,
        "eos_token_id": 2019, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 128, "layer_types": ["full_attention"] * 3, "max_position_embeddings": 40960,
        "max_window_layers": 3, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 3,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 2048,
    },
    "torch_dtype": "float32", "transformers_version": "4.55.0",
    "vision_config": {
        "architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0, "dropout": 0.0,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 32, "image_size": [SIDE, SIDE],
        "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 64, "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm",
        "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 3, "patch_size": [14, 14],
        "projection_dropout": 0.0, "torch_dtype": "float32", "use_absolute_position_embeddings": True,
        "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False,
    },
    "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
}
IMAGE_PROCESSOR = {
    "crop_size": None, "crop_to_patches": False, "data_format": "channels_first", "default_to_square": True,
    "device": None, "disable_grouping": None, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "image_mean": [0.485, 0.456, 0.406],
    "image_processor_type": "GotOcr2ImageProcessorFast", "image_std": [0.229, 0.224, 0.225], "input_data_format": None,
    "max_patches": 12, "min_patches": 1, "processor_class": "InternVLProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "return_tensors": None, "size": {"height": SIDE, "width": SIDE},
}
PROCESSOR = {"image_seq_length": 16, "processor_class": "InternVLProcessor"}
# Renders what the published template renders: the turns, a newline after each image, no system prompt of its own.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- for part in ([{'type': 'text', 'text': message.content}] if message.content is string else message.content) %}
        {%- if part.type == 'image' %}
            {{- '<IMG_CONTEXT>\\n' }}
        {%- elif part.type == 'video' %}
            {{- '<video>\\n' }}
        {%- elif part.type == 'text' %}
            {{- part.text }}
        {%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def copy_tokenizer():
    """small-tied's tokenizer with the tokens of images."""
    tokenizer = json.loads((SMALL / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((SMALL / "tokenizer_config.json").read_text(encoding="utf-8"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    for number, token in enumerate(TOKENS.values(), FIRST):
        tokenizer["added_tokens"].append({"id": number, "content": token} | flags)
        settings["added_tokens_decoder"][str(number)] = {"content": token} | flags
    del settings["chat_template"]
    settings |= TOKENS | {"extra_special_tokens": TOKENS, "processor_class": "InternVLProcessor"}
    write_json(FOLDER / "tokenizer.json", tokenizer, indent=None)
    write_json(FOLDER / "tokenizer_config.json", settings)


def make_folder():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    copy_tokenizer()
    shutil.copy(SMALL / "generation_config.json", FOLDER / "generation_config.json")
    write_json(FOLDER / "config.json", in_order(CONFIG))
    write_json(FOLDER / "preprocessor_config.json", IMAGE_PROCESSOR)
    write_json(FOLDER / "processor_config.json", PROCESSOR)
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    save(drawn_tensors(FOLDER, SEED), FOLDER)
    check_loads(FOLDER)


def sizes():
    """Heights and widths: usual ones, extreme and tiny ones, ratios half-way between two grids, and random ones."""
    found = [(1, 1), (1, 9), (9, 1), (2, 3), (14, 14), (111, 113), (112, 112), (447, 449), (448, 448), (449, 449)]
    found += [(480, 640), (720, 1280), (1080, 1920), (1920, 1080), (3024, 4032), (4032, 3024), (8000, 8000)]
    found += [(10, 5000), (5000, 10), (20000, 1), (1, 20000), (100, 1199), (100, 1201), (1201, 100), (300, 100)]
    # Ratios of two or three grids: a larger one is taken if it has less than twice the image's area.
    found += [(side, side) for side in (158, 159, 237, 238, 633, 634, 950, 951)]
    found += [(side, 2 * side) for side in (158, 159, 633, 634)] + [(2 * side, side) for side in (158, 159, 633, 634)]
    found += [(side, 3 * side) for side in (158, 159, 633, 634)] + [(3 * side, side) for side in (158, 159, 633, 634)]
    ratios = sorted({Fraction(*grid) for grid in get_all_supported_aspect_ratios(1, 12)})
    middles = [(low + high) / 2 for low, high in zip(ratios, ratios[1:])]
    found += [(middle.denominator * 24, middle.numerator * 24) for middle in middles]
    draw = random.Random(5)
    return found + [(draw.randint(8, 2500), draw.randint(8, 2500)) for _ in range(75)]


def tables():
    """The contents of tiles.json."""
    processor, rows, cases = AutoImageProcessor.from_pretrained(FOLDER), [], []
    for number, (height, width) in enumerate(sizes()):
        limits = [(448, 1, 12), (112, 1, 12)] + [(448, 1, 6), (112, 3, 6)] * (number % 8 == 0)
        for side, low, high in limits:
            grid = get_optimal_tiled_canvas((height, width), (side, side), low, high)
            patch_size = {"height": side, "width": side}
            settings = {"crop_to_patches": True, "min_patches": low, "max_patches": high, "patch_size": patch_size}
            tiles = processor.get_number_of_image_patches(height, width, settings)
            rows.append([height, width, side, low, high, *grid, tiles])
    for path in IMAGES:
        for high in (12, 4, 1):
            out = processor([pixels(path)], crop_to_patches=True, max_patches=high, return_tensors="pt")
            side = SIDE // CONFIG["vision_config"]["patch_size"][0]
            grid = torch.tensor([out["num_patches"][0], side, side])
            cases.append(case(NAME, [path], patches(out["pixel_values"], CONFIG), grid, max_patches=high))
    return rows, cases


def write_tables(rows, cases):
    columns = ["height", "width", "side", "min_patches", "max_patches", "columns", "rows", "tiles with the thumbnail"]
    rows, cases = (",\n".join(map(json.dumps, lines)) for lines in (rows, cases))
    text = f'{{"columns": {json.dumps(columns)}, "tiles": [\n{rows}\n], "pixels": [\n{cases}\n]}}\n'
    TILES.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare weights and tables with the stored ones")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.check:
        check_drawn(FOLDER, SEED)
        stored = json.loads(TILES.read_text(encoding="utf-8"))
        assert (stored["tiles"], stored["pixels"]) == tables(), "tiles.json differs"
        return
    make_folder()
    write_tables(*tables())
    write_results(NAME, DATA)


if __name__ == "__main__":
    main()
