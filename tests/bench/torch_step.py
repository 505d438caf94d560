"""Times PyTorch training a small text model of the Qwen3-VL or Qwen3.5 kind on random tokens with log-normal lengths.

  python tests/bench/torch_step.py --mode padded|per-sample|packed|packed-dense --hidden 512 ...

padded        right-padded batches, Hugging Face model, sdpa with an attention mask
per-sample    one forward and backward per sample, no padding, causal sdpa
packed-dense  one row per micro-batch of samples, with a dense block-diagonal mask
packed        the same row, with causal sdpa on each segment, so that no masked work is computed

--family qwen3_5 trains a Qwen3.5 of the same sizes. transformers mixes the samples of its packed rows, so
only `padded` and `per-sample` are right.

--family qwen3_vl_moe has --experts in each layer in place of the MLP; --experts-implementation names that
of transformers.

--lora R trains a PEFT adapter of rank R of all linear layers of the decoder instead of the decoder
(needs the package peft). --only-targets computes lm_head and the loss on target positions only. --dump-lengths FILE writes the
lengths of each step, so that another trainer can do the same work. --jsonl FILE writes a chat data
set whose rows have those token counts with Qwen's tokenizer. --model-out DIR writes the model
(`vs_torch.sh` adds the tokenizer and the template).

Prints one JSON line: real (non-padding) tokens per second and per CPU second, peak RSS, and step
times. On a shared machine, compare the figures per CPU second.
"""
import argparse, json, math, os, random, resource, sys, time
import torch
import torch.nn.functional as F

def lengths(a):
    rng = random.Random(a.seed)
    out = []
    for _ in range(a.steps + a.warmup):
        out.append([int(min(a.max_len, max(a.min_len, math.exp(rng.gauss(math.log(a.median), a.sigma))))) for _ in range(a.batch_size)])
    return out

def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--mode", default="padded", choices=["padded", "per-sample", "packed", "packed-dense"])
    for k, v in dict(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=151936, batch_size=8, micro=4, steps=4, warmup=1, min_len=64, max_len=1024, median=256, seed=0, threads=2).items():
        ap.add_argument("--" + k.replace("_", "-"), type=int, default=v)
    ap.add_argument("--family", default="qwen3_vl", choices=["qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
    ap.add_argument("--experts", type=int, default=16); ap.add_argument("--experts-per-token", type=int, default=4); ap.add_argument("--expert-width", type=int, default=192)
    ap.add_argument("--experts-implementation", help="of transformers: eager, batched_mm, grouped_mm; the default is its own choice")
    ap.add_argument("--sigma", type=float, default=0.7); ap.add_argument("--target-fraction", type=float, default=0.5)
    ap.add_argument("--lr", type=float, default=1e-4); ap.add_argument("--untied", action="store_true"); ap.add_argument("--only-targets", action="store_true")
    ap.add_argument("--dtype", default="f32", choices=["f32", "bf16"], help="bf16: autocast over f32 weights")
    ap.add_argument("--lora", type=int, default=0); ap.add_argument("--lora-dropout", type=float, default=0.0); ap.add_argument("--checkpointing", action="store_true"); ap.add_argument("--dump-lengths"); ap.add_argument("--jsonl"); ap.add_argument("--only-data", action="store_true", help="write --jsonl and stop"); ap.add_argument("--model-out", help="write the model folder's config and weights here")
    a = ap.parse_args()
    if a.family == "qwen3_5" and a.mode.startswith("packed"):
        ap.error("transformers mixes the samples of packed rows of Qwen3.5: use padded or per-sample")
    L = lengths(a)
    if a.dump_lengths:
        json.dump(L, open(a.dump_lengths, "w"))
    if a.jsonl:
        rng = random.Random(1)
        words = ["data", "model", "token", "vision", "train", "loss", "step", "batch", "image", "pack", "mask", "rope", "norm", "head", "layer", "grad"]
        with open(a.jsonl, "w") as f:
            for s, step in enumerate(L):
                for i, n in enumerate(step):      # one word is one token with the Qwen tokenizer; the template adds 10
                    m = max(2, n - 10); k = m // 2
                    f.write(json.dumps({"id": f"bench-{s}-{i}", "messages": [{"role": "user", "content": " ".join(rng.choice(words) for _ in range(k))}, {"role": "assistant", "content": " ".join(rng.choice(words) for _ in range(m - k))}]}) + "\n")
        if a.only_data:
            return
    torch.set_num_threads(a.threads); torch.manual_seed(0)
    more, vision = {}, {"deepstack_visual_indexes": [0]}
    if a.family == "qwen3_5":
        from transformers import Qwen3_5Config as Config, Qwen3_5ForConditionalGeneration as Model
        half = a.head_dim // 8; vision = {}
        more = dict(linear_num_key_heads=a.kv_heads, linear_num_value_heads=a.heads, linear_key_head_dim=a.head_dim, linear_value_head_dim=a.head_dim, linear_conv_kernel_dim=4,
                    layer_types=["full_attention" if k % 4 == 3 else "linear_attention" for k in range(a.layers)])
    elif a.family == "qwen3_vl_moe":
        from transformers import Qwen3VLMoeConfig as Config, Qwen3VLMoeForConditionalGeneration as Model
        half = a.head_dim // 2
        more = dict(num_experts=a.experts, num_experts_per_tok=a.experts_per_token, moe_intermediate_size=a.expert_width, decoder_sparse_step=1, mlp_only_layers=[])
    else:
        from transformers import Qwen3VLConfig as Config, Qwen3VLForConditionalGeneration as Model
        half = a.head_dim // 2
    side = round(half * 20 / 64)
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_interleaved": True, "mrope_section": [half - 2 * side, side, side]}
    if a.family == "qwen3_5":
        rope["partial_rotary_factor"] = 0.25
    cfg = Config(tie_word_embeddings=not a.untied, image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
        text_config=dict(hidden_size=a.hidden, num_hidden_layers=a.layers, num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, head_dim=a.head_dim, intermediate_size=a.intermediate, vocab_size=a.vocab,
                         rope_parameters=rope, **more),
        vision_config=dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=128, out_hidden_size=a.hidden, **vision))
    model = Model._from_config(cfg, attn_implementation="sdpa")
    if a.experts_implementation:
        model.set_experts_implementation(a.experts_implementation)
    model.train()
    if a.model_out:
        model.save_pretrained(a.model_out)
        p = os.path.join(a.model_out, "config.json"); c = json.load(open(p)); t = c["text_config"]     # the published layout
        t["tie_word_embeddings"] = not a.untied
        if a.family != "qwen3_5":
            r = t.pop("rope_parameters"); t["rope_theta"] = r.pop("rope_theta"); t["rope_scaling"] = r
        c["vision_config"].pop("rope_parameters", None); c["vision_config"]["model_type"] = a.family; json.dump(c, open(p, "w"), indent=2)
    if a.checkpointing:
        model.gradient_checkpointing_enable()
    params = [p for n, p in model.named_parameters() if ".visual." not in n]
    for n, p in model.named_parameters():
        if ".visual." in n: p.requires_grad_(False)
    if a.lora:      # in place; freezes all other parameters
        from peft import LoraConfig, get_peft_model
        get_peft_model(model, LoraConfig(r=a.lora, lora_alpha=2 * a.lora, lora_dropout=a.lora_dropout, task_type="CAUSAL_LM",
                                         target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))
        model.train(); params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=a.lr)
    bounds = [None]
    if a.mode == "packed":
        from transformers import AttentionInterface
        def seg(module, q, k, v, mask, scaling=None, dropout=0.0, **kw):
            o = []
            for s, e in bounds[0]:
                o.append(F.scaled_dot_product_attention(q[:, :, s:e], k[:, :, s:e], v[:, :, s:e], is_causal=True, scale=scaling, enable_gqa=True))
            return torch.cat(o, 2).transpose(1, 2).contiguous(), None
        AttentionInterface.register("segments", seg)
        try:
            from transformers import AttentionMaskInterface
            AttentionMaskInterface.register("segments", lambda *x, **y: None)
        except ImportError:
            pass
        model.set_attn_implementation("segments")
    g = torch.Generator().manual_seed(a.seed)
    def sample(n):
        ids = torch.randint(0, min(a.vocab, 150000), (n,), generator=g)
        lab = ids.clone(); lab[: n - max(1, int(n * a.target_fraction))] = -100
        return ids, lab
    def loss_of(ids, lab, n_all, **kw):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            h = model.model(input_ids=ids, use_cache=False, **kw)[0]
            hs, y = h[:, :-1].reshape(-1, h.shape[-1]), lab[:, 1:].reshape(-1)
            if a.only_targets:
                keep = y != -100; hs, y = hs[keep], y[keep]
            lg = model.lm_head(hs)
        return F.cross_entropy(lg.float(), y, ignore_index=-100, reduction="sum") / n_all
    times, cpu, toks, padded_toks = [], [], 0, 0
    for step, lens in enumerate(L):
        S = [sample(n) for n in lens]
        n_all = sum(int((l[1:] != -100).sum()) for _, l in S)
        t, c = time.perf_counter(), time.process_time()
        tot = 0.0; pt = 0
        m = 1 if a.mode == "per-sample" else a.micro
        for i in range(0, len(S), m):
            P = S[i:i + m]
            if a.mode == "padded":
                W = max(len(x) for x, _ in P)
                ids = torch.stack([F.pad(x, (0, W - len(x))) for x, _ in P]); lab = torch.stack([F.pad(y, (0, W - len(y)), value=-100) for _, y in P])
                am = torch.stack([F.pad(torch.ones(len(x), dtype=torch.long), (0, W - len(x))) for x, _ in P]); pt += ids.numel()
                loss = loss_of(ids, lab, n_all, attention_mask=am)
            elif a.mode == "per-sample":
                ids, lab = P[0][0][None], P[0][1][None]; pt += ids.numel()
                loss = loss_of(ids, lab, n_all)
            else:
                ids = torch.cat([x for x, _ in P])[None]; lab = torch.cat([y for _, y in P])[None]; pt += ids.numel()
                ln = [len(x) for x, _ in P]; pos = torch.cat([torch.arange(n) for n in ln])
                p3 = pos[None, None].expand(3, 1, -1)
                e = torch.tensor(ln).cumsum(0).tolist(); bounds[0] = list(zip([0] + e[:-1], e))
                if a.mode == "packed":
                    loss = loss_of(ids, lab, n_all, position_ids=p3)
                else:
                    sg = torch.repeat_interleave(torch.arange(len(ln)), torch.tensor(ln)); T = len(sg)
                    mask = (sg[:, None] == sg[None]) & torch.ones(T, T, dtype=torch.bool).tril()
                    loss = loss_of(ids, lab, n_all, attention_mask=mask[None, None], position_ids=p3)
            loss.backward(); tot += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(params, 1.0); opt.step(); opt.zero_grad(set_to_none=True)
        dt, dc = time.perf_counter() - t, time.process_time() - c
        print(f"step {step} loss {tot:.4f} tokens {sum(lens)} computed {pt} wall {dt:.2f}s cpu {dc:.2f}s", file=sys.stderr, flush=True)
        if step >= a.warmup:
            times.append(dt); cpu.append(dc); toks += sum(lens); padded_toks += pt
    if not times:
        return
    print(json.dumps({"mode": a.mode, "dtype": a.dtype, "only_targets": a.only_targets, "lora": a.lora, "parameters_trained": sum(p.numel() for p in params), "threads": a.threads, "steps": len(times), "tokens": toks, "computed_tokens": padded_toks,
                      "tokens_per_s_wall": round(toks / sum(times), 1), "tokens_per_cpu_s": round(toks / sum(cpu), 1), "step_wall_s": [round(x, 2) for x in times], "last_loss": tot, "load_avg": os.getloadavg()[0], "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2), "torch": torch.__version__}))

if __name__ == "__main__":
    main()
