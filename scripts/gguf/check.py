"""Compares llama.cpp with `trainer`: answers, and the likelihoods of the expected answers.

    check.py TRAINER MODEL_FOLDER GGUF_FOLDER ROWS PER_SAMPLE FEWEST TOLERANCE

GGUF_FOLDER is one of `trainer export --gguf`, ROWS are those of rows.py, and PER_SAMPLE is the file
of `trainer eval --per-sample`. Fails if fewer than FEWEST answers are equal, or if the logarithm of
a likelihood differs by more than TOLERANCE. llama.cpp computes with a cache in f32.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jinja2
import numpy as np
from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib, get_mtmd_lib

trainer, folder, written, rows, per_sample, fewest, tolerance = sys.argv[1:]
ffi, lib, mtmd = get_ffi(), get_lib(), get_mtmd_lib()
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
MAX_NEW_TOKENS = 24


@ffi.callback("void(enum ggml_log_level, const char *, void *)")
def quiet(level, text, data):
    if level == lib.GGML_LOG_LEVEL_ERROR:
        sys.stderr.write(ffi.string(text).decode())


def one(pattern):
    return next(iter(Path(written).glob(pattern)), None)


class Client:
    """A model and its vision encoder in llama.cpp."""

    def __init__(self):
        for log in (lib.llama_log_set, mtmd.mtmd_log_set, mtmd.mtmd_helper_log_set):
            log(quiet, ffi.NULL)
        lib.llama_backend_init()
        path = one("model-*.gguf")
        fields = gguf.GGUFReader(path).fields
        template = fields["tokenizer.chat_template"].contents()
        env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        env.globals["raise_exception"] = lambda text: None
        self.template = env.from_string(template)
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = 2048, 2048, 512
        settings.flash_attn_type, settings.type_k, settings.type_v = 0, 0, 0
        self.context = lib.llama_init_from_model(self.model, settings)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vision, path = ffi.NULL, one("mmproj-*.gguf")
        if path:
            settings = mtmd.mtmd_context_params_default()
            settings.use_gpu, settings.flash_attn_type, settings.warmup = False, 0, False
            self.vision = mtmd.mtmd_init_from_file(str(path).encode(), self.model, settings)
            assert self.vision != ffi.NULL, path

    def tokens(self, text):
        data = text.encode()
        found = ffi.new("llama_token[]", len(data) + 8)
        count = lib.llama_tokenize(self.vocab, data, len(data), found, len(found), False, True)
        assert count >= 0
        return list(found[0:count])

    def decode(self, tokens, past):
        """Logits after the last of these tokens."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for k, token in enumerate(tokens):
            batch.token[k], batch.pos[k] = token, past + k
            batch.n_seq_id[k], batch.seq_id[k][0] = 1, 0
            batch.logits[k] = k + 1 == len(tokens)
        assert lib.llama_decode(self.context, batch) == 0
        lib.llama_batch_free(batch)
        return self.logits(), past + len(tokens)

    def logits(self):
        found = lib.llama_get_logits_ith(self.context, -1)
        size = lib.llama_vocab_n_tokens(self.vocab)
        return np.frombuffer(ffi.buffer(found, 4 * size), np.float32).copy()

    def prompt(self, messages):
        """Logits after the prompt, the number of its positions, and that of its tokens."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        text = self.template.render(
            messages=messages, add_generation_prompt=True, enable_thinking=False
        )
        images = [part["image"] for part in messages[0]["content"] if part["type"] == "image"]
        if not images:
            tokens = self.tokens(text)
            return *self.decode(tokens, 0), len(tokens)
        text = text.replace(PLACE, ffi.string(mtmd.mtmd_default_marker()).decode()).encode()
        options = mtmd.mtmd_helper_init_opt_default()
        bitmaps = [
            mtmd.mtmd_helper_bitmap_init_from_file(self.vision, path.encode(), False, options).bitmap
            for path in images
        ]
        kept = ffi.new("char[]", text)
        given = ffi.new("struct mtmd_input_text *", [kept, len(text), False, True])
        chunks = mtmd.mtmd_input_chunks_init()
        list_of = ffi.new("mtmd_bitmap *[]", bitmaps)
        failed = mtmd.mtmd_tokenize(self.vision, chunks, given, list_of, len(bitmaps))
        assert failed == 0, failed
        past = ffi.new("llama_pos *")
        failed = mtmd.mtmd_helper_eval_chunks(
            self.vision, self.context, chunks, 0, 0, 2048, True, past
        )
        assert failed == 0, failed
        count = mtmd.mtmd_helper_get_n_tokens(chunks)
        mtmd.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd.mtmd_bitmap_free(bitmap)
        return self.logits(), past[0], count

    def answer(self, messages):
        """The greedy answer, the number of tokens of the prompt, and the least distance of the
        first two logits."""
        logits, past, count = self.prompt(messages)
        data, margin = b"", np.inf
        for _ in range(MAX_NEW_TOKENS):
            second, first = np.sort(logits)[-2:]
            margin = min(margin, float(first - second))
            token = int(logits.argmax())
            if lib.llama_vocab_is_eog(self.vocab, token):
                break
            piece = ffi.new("char[]", 256)
            size = lib.llama_token_to_piece(self.vocab, token, piece, 256, 0, False)
            data += ffi.buffer(piece, size)[:]
            logits, past = self.decode([token], past)
        return data.decode(errors="replace"), count, margin

    def nll(self, messages, expected):
        """The summed negative log likelihood of an answer, and its number of tokens."""
        logits, past, _ = self.prompt(messages)
        tokens, total = self.tokens(expected + "<|im_end|>"), 0.0
        for token in tokens:
            x = logits.astype(np.float64)
            total += np.log(np.exp(x - x.max()).sum()) + x.max() - x[token]
            logits, past = self.decode([token], past)
        return total, len(tokens)


def without_preload():
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def of_trainer(user):
    """The answer of `trainer generate`, and the number of tokens of the prompt."""
    command = [trainer, "generate", "--model", folder, "--json", "--device", "cpu"]
    command += ["--max-new-tokens", str(MAX_NEW_TOKENS)]
    for part in user["content"]:
        command += ["--image", part["image"]] if part["type"] == "image" else []
        command += ["--prompt", part["text"]] if part["type"] == "text" else []
    done = subprocess.run(command, capture_output=True, text=True, env=without_preload())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["answer"], found["num_prompt_tokens"]


def main():
    client = Client()
    rows_of = [json.loads(line) for line in open(rows)]
    likelihoods = [json.loads(line) for line in open(per_sample)]
    assert len(rows_of) == len(likelihoods) == 50
    stored = Path(folder) / "answers.json"
    if not stored.exists():
        stored.write_text(json.dumps([of_trainer(row["messages"][0]) for row in rows_of]))
    answers = json.loads(stored.read_text())
    equal, right, worst, margins = 0, 0, 0.0, []
    for row, (answer, count), of_row in zip(rows_of, answers, likelihoods):
        user, expected = row["messages"][:1], row["messages"][1]["content"]
        found, count_here, margin = client.answer(user)
        assert count_here == count, f"{count_here} tokens of the prompt, expected {count}: {user}"
        margins.append(margin)
        equal += found == answer
        right += found == expected
        if found != answer:
            print(f"  `{found}`, expected `{answer}` (margin {margin:.4f})")
        nll, targets = client.nll(user, expected)
        assert targets == of_row["num_targets"], (targets, of_row)
        worst = max(worst, abs(nll - of_row["nll_sum"]) / targets)
    print(
        f"{Path(written).name}: {equal} of 50 answers equal, {right} right; log likelihoods of a token "
        f"differ by up to {worst:.1e}; least distance of the first two logits {min(margins):.3f}"
    )
    if equal < int(fewest) or not worst <= float(tolerance):
        sys.exit(f"expected at least {fewest} equal answers, and differences up to {tolerance}")


main()
