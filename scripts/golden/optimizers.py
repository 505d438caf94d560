"""The optimizers of the reference: AdamW, AdamW of bitsandbytes in 8 bits, Muon and Adafactor."""

import torch


class Together:
    """Several optimizers that are called as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def groups(parameters, weight_decay):
    """Parameter groups; biases, norms and other 1-D parameters have no weight decay."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def quantize(values, code, absmax_out, codes_out, blocksize):
    """The nearest code of each value, as bitsandbytes on a GPU. On the CPU it takes a code near the
    nearest for small values."""
    for block, start in enumerate(range(0, values.numel(), blocksize)):
        x = values.view(-1)[start : start + blocksize]
        absmax = x.abs().max()
        absmax_out[block] = absmax
        nearest = (x[:, None] / absmax - code).abs().argmin(1).to(torch.uint8)
        codes_out.view(-1)[start : start + blocksize] = nearest if absmax > 0 else 0


def use_nearest_codes():
    import bitsandbytes.backends.cpu.ops as cpu

    cpu._quant_blockwise_fp32_direct = quantize


def zeropower(grad, coefficients, steps, eps):
    """The Newton-Schulz steps of torch.optim.Muon in the dtype of `grad`; PyTorch rounds to bf16."""
    a, b, c = coefficients
    tall = grad.shape[0] > grad.shape[1]
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def is_hidden_matrix(name, parameter):
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def make(named, args):
    """The optimizer of the trained parameters `named`."""
    parameters = [p for _, p in named]
    betas = {"lr": args.lr, "betas": (args.beta1, args.beta2), "eps": args.eps}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups(parameters, args.weight_decay), **betas)
    if args.optimizer == "adamw_8bit":
        import bitsandbytes

        use_nearest_codes()
        return bitsandbytes.optim.AdamW8bit(groups(parameters, args.weight_decay), **betas)
    if args.optimizer == "adafactor":
        return torch.optim.Adafactor(groups(parameters, args.weight_decay), lr=args.lr)
    from torch.optim import _muon

    _muon._zeropower_via_newtonschulz = zeropower
    hidden = [p for n, p in named if is_hidden_matrix(n, p)]
    rest = [p for n, p in named if not is_hidden_matrix(n, p)]
    muon = torch.optim.Muon(hidden, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")
    return Together(muon, torch.optim.AdamW(groups(rest, args.weight_decay), **betas))
