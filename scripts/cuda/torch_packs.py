"""Attention of transformers on packs: each sample of a row attends only to itself. For torch_bench.py."""
import inspect

import torch
import torch.nn.functional as F


class Packs:
    """Segment boundaries of the current micro-batch, for the decoder and the vision encoder."""

    text = vision = None


def boundaries(lengths, device):
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device), max(lengths), list(lengths)


def find_varlen(device):
    """Returns (name, f(q, k, v [T, H, Dh], boundaries, causal))."""
    if device.type == "cuda":
        try:
            from flash_attn import flash_attn_varlen_func

            return "flash-attn", lambda q, k, v, b, causal: flash_attn_varlen_func(q, k, v, b[0], b[0], b[1], b[1], causal=causal)
        except ImportError:
            pass
        try:
            from torch.nn.attention.varlen import varlen_attn

            known = inspect.signature(varlen_attn).parameters

            def varlen(q, k, v, b, causal):
                options = {"window_size": (-1, 0) if causal else (-1, -1)} if "window_size" in known else {"is_causal": causal}
                if q.shape[1] != k.shape[1]:
                    if "enable_gqa" in known:
                        options["enable_gqa"] = True
                    else:
                        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
                return varlen_attn(q, k, v, b[0], b[0], b[1], b[1], **options)

            return "torch.nn.attention.varlen", varlen
        except ImportError:
            pass

    def segments(q, k, v, b, causal):
        parts = zip(*(t.transpose(0, 1).split(b[2], 1) for t in (q, k, v)))
        same = dict(is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return torch.cat([F.scaled_dot_product_attention(*(t[None] for t in part), **same)[0] for part in parts], 1).transpose(0, 1)

    return "sdpa per segment", segments


def pack_attention(model, varlen):
    """Makes both attentions of `model` use the boundaries in `Packs`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.models.qwen3_vl import modeling_qwen3_vl as hf

    def text(module, q, k, v, mask, scaling=None, dropout=0.0, **_):
        o = varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), Packs.text, True)
        return o[None], None

    def vision(self, hidden_states, cu_seqlens=None, position_embeddings=None, **_):
        n = hidden_states.shape[0]
        q, k, v = self.qkv(hidden_states).reshape(n, 3, self.num_heads, -1).unbind(1)
        q, k = hf.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        return self.proj(varlen(q, k, v, Packs.vision, False).reshape(n, -1))

    AttentionInterface.register("packs", text)
    AttentionMaskInterface.register("packs", lambda *a, **k: None)
    model.model.language_model.config._attn_implementation = "packs"
    hf.Qwen3VLVisionAttention.forward = vision
