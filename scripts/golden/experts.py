"""Small models with experts, their training curves and losses by transformers and PyTorch.

  python scripts/golden/experts.py            # tests/golden/models/{moe-vl,moe-text,moe-qwen35}, experts.json
  python scripts/golden/experts.py --check    # draws the weights again and compares them with the stored ones

A curve has 20 optimizer steps of 8 rows with the settings of `curves.json`, one sample at a time. A token whose k-th
and (k+1)-th expert have nearly equal logits may go to either in another exact implementation, so the seeds were chosen
such that transformers itself gives the same curve for samples alone, padded and packed: `noise` is the largest
difference of their losses, and `margins` are the smallest differences of these two logits in each step.
`gradients` are the norms of the gradient of each expert in the first step.

  python scripts/golden/experts.py --model DIR --data DATA.jsonl   # only prints noise and margins of another model
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import qwen3_text
from make_variants import COPIES, SMALL, couple, write_json
from optimizers import groups as parameter_groups
from ref_trainer import add_adapter, file_name
from reference_lib import GOLDEN, IGNORE, Encoder, forward, read_jsonl

OUT = GOLDEN / "experts.json"
STEPS, ROWS, LOSSES = 20, 8, 16
AUX = 0.1  # large, so that it shows in the curve
SEEDS = {"moe-vl": 51, "moe-text": 52, "moe-qwen35": 70}
DATA = {"moe-vl": ("text", "image_exact"), "moe-text": ("text",), "moe-qwen35": ("text", "image_exact")}
# transformers carries the state of linear attention from one packed sample to the next, so only samples alone are
# right, and their noise is that of a run in float64.
MODES = {"moe-qwen35": ()}
# These curves end before the first step in which two of these logits are as near as rounding errors.
LENGTHS = {"text_moe-qwen35": 5, "image_exact_moe-qwen35": 10}
TEMPLATES = {"moe-qwen35": GOLDEN / "models" / "small-qwen35"}
# One layer without experts; 8 does not divide the width of an expert.
EXPERTS = {
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "moe_intermediate_size": 20, "norm_topk_prob": True,
    "num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}


def vl_config():
    """small-tied's config.json with experts, as Qwen3-VL-MoE was published."""
    config = json.loads((SMALL / "config.json").read_text(encoding="utf-8"))
    config["architectures"], config["model_type"] = ["Qwen3VLMoeForConditionalGeneration"], "qwen3_vl_moe"
    config["tie_word_embeddings"] = False
    text = config["text_config"]
    del text["tie_word_embeddings"]
    text.update(EXPERTS)
    text.update({
        "model_type": "qwen3_vl_moe_text", "hidden_size": 32, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 48,
    })
    text["rope_scaling"]["mrope_section"] = [4, 2, 2]
    config["vision_config"].update({
        "model_type": "qwen3_vl_moe", "depth": 2, "deepstack_visual_indexes": [0], "hidden_size": 32, "num_heads": 2,
        "intermediate_size": 40, "num_position_embeddings": 144, "out_hidden_size": 32,
    })
    return config


def text_config():
    """qwen3-text's config.json with experts, as Qwen3 30B-A3B was published."""
    return {
        **qwen3_text.CONFIG, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [],
        "decoder_sparse_step": 2, "num_hidden_layers": 4,
    }


def qwen35_config():
    """small-qwen35's config.json with experts and a shared one, as Qwen3.5 35B-A3B was published."""
    config = json.loads((TEMPLATES["moe-qwen35"] / "config.json").read_text(encoding="utf-8"))
    config["architectures"], config["model_type"] = ["Qwen3_5MoeForConditionalGeneration"], "qwen3_5_moe"
    config["tie_word_embeddings"] = False
    text = config["text_config"]
    for key in ("intermediate_size", "tie_word_embeddings", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        text.pop(key, None)
    text.update({
        "model_type": "qwen3_5_moe_text", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "layer_types": text["layer_types"][:4],
    })
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    config["vision_config"].update({
        "model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40,
        "num_position_embeddings": 144, "out_hidden_size": 32,
    })
    return config


CONFIGS = {"moe-vl": vl_config, "moe-text": text_config, "moe-qwen35": qwen35_config}


def auto(folder):
    kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["model_type"]
    return AutoModelForCausalLM if kind == "qwen3_moe" else AutoModelForImageTextToText


def load(folder, dtype=torch.float32):
    # the loop over experts, which also computes in float64
    model = auto(folder).from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    )
    return model.train()


def draw(model, seed):
    """Random weights in `named_parameters` order, large enough that a wrong expert or weight changes the loss."""
    generator = torch.Generator().manual_seed(seed)
    # Qwen3.5 adds 1 to the weights of these norms
    centred = {f"{n}.weight" for n, m in model.named_modules() if type(m).__name__ == "Qwen3_5MoeRMSNorm"}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if name in centred:
                weight.copy_(0.1 * noise)
            elif name.endswith("A_log"):
                weight.copy_((0.01 + 15.99 * torch.special.ndtr(noise)).log())
            elif name.endswith("dt_bias"):  # every second head forgets slowly
                step = torch.exp(math.log(0.002) + math.log(25.0) * torch.special.ndtr(noise))
                slow = torch.log(torch.expm1(step))
                weight.copy_(torch.where(torch.arange(len(noise)) % 2 == 0, torch.ones_like(slow), slow))
            elif weight.ndim == 1:
                weight.copy_(0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(0.2 * noise)
            elif "pos_embed" in name:
                weight.copy_(0.5 * noise)
            else:  # the patch convolution has five dimensions, and experts [E, out, in] three
                fan_in = weight[0].numel() if weight.ndim == 5 else weight.shape[-1]
                weight.copy_(noise / math.sqrt(fan_in))
        for module in model.modules():
            if hasattr(module, "in_proj_qkv"):
                couple(module)


def drawn(name):
    """The tensors of a folder in the published layout, drawn again."""
    folder = GOLDEN / "models" / name
    model = auto(folder).from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    draw(model, SEEDS[name])
    temporary = folder / "drawn"
    model.save_pretrained(temporary)
    tensors = load_file(temporary / "model.safetensors")
    shutil.rmtree(temporary)
    # transformers saves what it read; of a model that it made, the experts of Qwen3-VL as it computes with them
    if name == "moe-qwen35":  # published with one tensor for all experts, which are saved one by one
        return {n: t.detach().clone().contiguous() for n, t in model.state_dict().items()}
    experts = {n: t.transpose(1, 2).contiguous() for n, t in tensors.items() if t.ndim == 3 and ".mlp.experts." in n}
    return {**tensors, **experts}


def make_folder(name):
    folder = GOLDEN / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in COPIES:
        if name != "moe-text" or file != "preprocessor_config.json":
            shutil.copy(TEMPLATES.get(name, SMALL) / file, folder / file)
    write_json(folder / "config.json", CONFIGS[name]())
    save_file(drawn(name), folder / "model.safetensors", metadata={"format": "pt"})
    model, info = auto(folder).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    notes = {key: sorted(map(str, value)) for key, value in info.items() if value}
    fresh = auto(folder).from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    draw(fresh, SEEDS[name])
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))
    if notes or not same:
        raise SystemExit(f"{name}: transformers reports {notes}, equal weights: {same}")
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")


def sums(model, config, samples, mode):
    """Sum of the negative log likelihoods of each sample, or of all of them."""
    if "vision_config" in config:
        return [result[0] for result in forward(model, config, samples, mode)]
    if mode == "per-sample":
        return [qwen3_text.packed(model, [sample]) for sample in samples]
    return [{"padded": qwen3_text.padded, "packed": qwen3_text.packed}[mode](model, samples)]


class Routers:
    """The logits that the routers compute in a step, by layer."""

    def __init__(self, model, top_k):
        self.top_k, self.logits = top_k, {}
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _module, _inputs, outputs, layer=layer: self.add(layer, outputs[0]))

    def add(self, layer, logits):
        self.logits.setdefault(layer, []).append(logits)

    def take(self):
        """`[T, E]` of each layer."""
        logits, self.logits = [torch.cat(self.logits[layer]) for layer in sorted(self.logits)], {}
        return logits

    def margin(self, logits):
        """The smallest difference of the k-th and the (k+1)-th logit."""
        best = torch.cat(logits).detach().float().topk(self.top_k + 1, dim=-1).values
        return float((best[..., -2] - best[..., -1]).min())

    def loads(self, logits):
        """The largest number of tokens of an expert over the mean of its layer, and the share of experts without."""
        counts = []
        for layer in logits:
            chosen = layer.detach().topk(self.top_k, dim=-1).indices
            counts.append(torch.bincount(chosen.flatten(), minlength=layer.shape[-1]).double())
        load = max(float(c.max() / c.mean()) for c in counts)
        return load, float((torch.stack(counts) == 0).double().mean())


def count(samples):
    return sum(label != IGNORE for s in samples for label in s["labels"][1:])


def train(folder, samples, mode="per-sample", dtype=torch.float32, aux=0.0, adapter=None):
    """A curve, with the margins of each step and the norms of the gradients of the first one. `aux` is the factor of
    the auxiliary loss over all tokens of a step. With the folder of an adapter, only the adapter is trained."""
    model, config = load(folder, dtype), json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    routers = Routers(model, text["num_experts_per_tok"])
    if adapter:
        add_adapter(model, argparse.Namespace(init=None, adapter=str(adapter), rslora=False))
    trained = [(file_name(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in trained]
    optimizer = torch.optim.AdamW(parameter_groups(parameters, 0.0), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    curve = {"loss": [], "grad_norm": [], "target_tokens": [], "margins": []}
    if aux:
        curve.update({"aux_loss": [], "expert_load": [], "experts_idle": []})
    for step in range(STEPS):
        batch = [samples[(step * ROWS + k) % len(samples)] for k in range(ROWS)]
        if dtype == torch.float64:
            batch = [{**s, "pixel_values": s["pixel_values"] if s["pixel_values"] is None else s["pixel_values"].double()} for s in batch]
        loss = balance = 0.0
        for part in ([[sample] for sample in batch] if mode == "per-sample" else [batch]):
            own = sum(sums(model, config, part, mode)) / count(batch)
            loss += float(own.detach())
            if aux:  # one graph for the whole step
                balance = balance + own
            else:
                own.backward()
        logits = routers.take()
        if aux:
            value = load_balancing_loss_func(tuple(logits), text["num_experts"], text["num_experts_per_tok"])
            (balance + aux * value).backward()
            largest, idle = routers.loads(logits)
            for key, number in (("aux_loss", float(value.detach())), ("expert_load", largest), ("experts_idle", idle)):
                curve[key].append(number)
        for parameter in parameters:
            if parameter.grad is None:  # a step without images
                parameter.grad = torch.zeros_like(parameter)
        if step == 0:
            curve["grad_norms_step1"] = {n: float(f"{float(p.grad.double().norm()):.7g}") for n, p in trained}
            curve["gradients"] = {
                n: [float(f"{float(g.double().norm()):.7g}") for g in p.grad] for n, p in trained if p.dim() == 3
            }
        curve["loss"].append(loss)
        curve["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        curve["target_tokens"].append(count(batch))
        curve["margins"].append(float(f"{routers.margin(logits):.3g}"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return curve


def differences(a, b):
    return [abs(x - y) for x, y in zip(a["loss"], b["loss"], strict=True)]


def curve(folder, data, more_modes=("padded", "packed")):
    encoder = Encoder(folder, GOLDEN / "data")
    rows = read_jsonl(data)[: STEPS * ROWS]
    samples = [encoder(row) for row in rows]
    alone = train(folder, samples)
    others = [train(folder, samples, mode) for mode in more_modes] or [train(folder, samples, dtype=torch.float64)]
    noise = max(max(differences(alone, other)) for other in others)
    print(f"{folder} {data}: {alone['loss'][0]:.6f} to {alone['loss'][-1]:.6f}, noise {noise:.2g}, margins {min(alone['margins']):.2g}", flush=True)
    return {"model": Path(folder).name, "data": Path(data).name, "args": {}, **alone, "noise": float(f"{noise:.2g}")}


def losses(name, data):
    """`[id, mean nll, targets]` of the first rows."""
    folder = GOLDEN / "models" / name
    encoder, model, rows = Encoder(folder, GOLDEN / "data"), load(folder), []
    with torch.no_grad():
        for row in read_jsonl(GOLDEN / "data" / f"{data}.jsonl")[:LOSSES]:
            sample = encoder(row)
            (nll,) = sums(model, encoder.config, [sample], "per-sample")
            rows.append([row["id"], round(float(nll) / count([sample]), 6), count([sample])])
    return {"rows": len(rows), "per_sample": rows}


def examine(folder, data):
    """Prints how far runs of the same model by transformers are apart."""
    samples = [Encoder(folder, Path(data).parent)(row) for row in read_jsonl(data)[: STEPS * ROWS]]
    alone = train(folder, samples)
    others = {"padded": train(folder, samples, "padded"), "packed": train(folder, samples, "packed")}
    others["f64"] = train(folder, samples, dtype=torch.float64)
    for step in range(STEPS):
        off = " ".join(f"{name} {differences(alone, other)[step]:.1e}" for name, other in others.items())
        print(f"step {step + 1:2}: {off} margin {alone['margins'][step]:.1e} (f64 {others['f64']['margins'][step]:.1e})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the weights with the stored ones")
    parser.add_argument("--only", nargs="*", choices=SEEDS, help="only these models")
    parser.add_argument("--model", help="only examine this folder")
    parser.add_argument("--data", help="rows for `--model`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.model:
        examine(args.model, args.data)
        return
    if args.check:
        for name in SEEDS:
            stored, again = load_file(GOLDEN / "models" / name / "model.safetensors"), drawn(name)
            if stored.keys() != again.keys() or not all(torch.equal(stored[n], again[n]) for n in stored):
                raise SystemExit(f"{name}: the drawn weights differ from the stored ones")
            print(f"{name}: {len(stored)} tensors equal to the stored ones")
        return
    golden = {"curves": {}, "losses": {}}
    if args.only:
        golden = json.loads(OUT.read_text(encoding="utf-8"))
    for name in args.only or SEEDS:
        make_folder(name)
        for data in DATA[name]:
            golden["losses"][f"{name}|{data}"] = losses(name, data)
            entry = curve(GOLDEN / "models" / name, GOLDEN / "data" / f"{data}.jsonl", MODES.get(name, ("padded", "packed")))
            length = LENGTHS.get(f"{data}_{name}", STEPS)
            cut = {key: entry[key][:length] for key in ("loss", "grad_norm", "target_tokens", "margins")}
            golden["curves"][f"{data}_{name}"] = entry | cut
        if name == "moe-vl":
            folder, data = GOLDEN / "models" / name, "image_exact"
            samples = [Encoder(folder, GOLDEN / "data")(row) for row in read_jsonl(GOLDEN / "data" / f"{data}.jsonl")]
            entry = train(folder, samples[: STEPS * ROWS], aux=AUX)
            golden["curves"][f"{data}_{name}_aux"] = {"model": name, "data": f"{data}.jsonl", "args": {"aux_loss": AUX}, **entry}
    OUT.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
