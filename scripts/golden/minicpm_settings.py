"""The settings and the chat template of `tests/golden/models/small-minicpm`, for `minicpm.py`.

They have the keys of the published files of MiniCPM-V 4.6. The position table has 10 x 10 rows,
which most images have to shrink or to stretch. `layer_norm_eps` is not that of the merger, which is
fixed. As in the published file, 8 does not divide the vocabulary, and there are no weights of the
additional layer that `mtp_num_hidden_layers` mentions.
"""

TOKENS = {  # the attributes of the tokenizer that the processor reads
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "image_start_token": "<image>", "image_end_token": "</image>",
    "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}
OWNER = {"processor_class": "MiniCPMV4_6Processor"}
TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
    "full_attention_interval": 4, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 96,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 32, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
    },
    "tie_word_embeddings": True, "use_cache": True, "vocab_size": 2054,
}
VISION = {
    "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32,
    "image_size": 140, "insert_layer_id": 1, "intermediate_size": 56, "layer_norm_eps": 1e-04,
    "model_type": "minicpmv4_6_vision", "num_attention_heads": 2, "num_channels": 3,
    "num_hidden_layers": 4, "patch_size": 14, "window_kernel_size": [2, 2],
}
CONFIG = {
    "architectures": ["MiniCPMV4_6ForConditionalGeneration"], "downsample_mode": "16x",
    "drop_vision_last_layer": False, "dtype": "float32", "eos_token_id": 2017, "image_size": 1120,
    "image_token_id": 2029, "insert_layer_id": 1, "merge_kernel_size": [2, 2], "merger_times": 1,
    "model_type": "minicpmv4_6", "text_config": TEXT, "tie_word_embeddings": True,
    "video_token_id": 2030, "vision_config": VISION,
}
SHARED = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "downsample_mode": "16x", "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "max_slice_nums": 9, "patch_size": 14, "resample": 3, "rescale_factor": 0.00392156862745098,
    "scale_resolution": 112, "slice_mode": True, "use_image_id": True,
}
IMAGE_PROCESSOR = SHARED | {"image_processor_type": "MiniCPMV4_6ImageProcessor"}
VIDEO_PROCESSOR = SHARED | {
    "do_sample_frames": True, "max_num_frames": 128, "return_metadata": False, "stack_frames": 1,
    "video_processor_type": "MiniCPMV4_6VideoProcessor",
}
GENERATION = {
    "bos_token_id": 2018, "do_sample": True, "eos_token_id": [2017, 2019],
    "repetition_penalty": 1.0, "temperature": 0.7, "top_k": 0, "top_p": 1.0,
}
# Replaces the beginning and the end of small-qwen35's template, which writes the turns.
TEMPLATE_BEGIN = """\
{#- Hand-written stand-in for the chat template of MiniCPM-V 4.6: same text, not same source. -#}
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
            {%- if pad and in_system %}
                {{- raise_exception('System message cannot contain images or videos.') }}
            {%- endif %}
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
