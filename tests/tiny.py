"""Tiny GGUF pairs for tests with real llama.cpp: written in milliseconds, about 3 MB, seeded.

The target is a *bent bigram*: every token carries one of 16 letter codes, the head turns code `a`
into the letter `next_code(a)`, and random layers bend that by what stands before (`context=0`
leaves the bare 16-cycle). All layers are real, so memory, rollback and positions matter.

A *good* drafter follows the bare bigram by hand-made attention: its head k looks exactly k
positions back, so slot k finds the anchor and names the letter k steps on. It is right where the
target is not bent. A drafter with `good=False` is random and hardly ever right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Keys = dict[str, Any]
Tensors = dict[str, Array]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
_MERGES = (
    "Ġ t|h e|i n|r e|o n|Ġt he|Ġ a|e r|a t|Ġ s|n d|Ġ w|Ġ o|Ġ c|e n|i t|i s|o r|e s|Ġ f|Ġa nd|o u|"
    "in g|e d|Ġ b|Ġ p|a n|a l|Ġ m|Ġt o|Ġo f|a r|Ġ in|Ġ h|s t|l e|i c|Ġ d|Ġ n|a s|l l|Ġ y|Ġy ou|"
    "c h|o m|e l|s er|u ser|Ġi s"
)
MERGES = _MERGES.split("|")
LETTERS = " etaoinshrdlucmf"
N_CODES = len(LETTERS)
HEAD_DIM = 32
FILE_TYPE_F32 = 0
WIDE = ("qwen2", "phi3", "olmo2")  # their query is as wide as the model
PRE_NORMS = {"qwen35": ("attn_norm", "post_attention_norm"), "olmo2": ()}
POST_NORMS = ("gemma3", "olmo2", "muse-glimmer")


def next_code(code: int, steps: int = 1) -> int:
    """The letter code that follows `code` after `steps` steps: a walk through all 16."""
    for _ in range(steps):
        code = (5 * code + 3) % N_CODES
    return code


# --- vocabulary


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte value."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    stand_in = {byte: byte for byte in shown} | {byte: 256 + i for i, byte in enumerate(hidden)}
    return [chr(stand_in[byte]) for byte in range(256)]


def _vocabulary(n_vocab: int) -> tuple[list[str], list[int]]:
    """Token texts and types: 256 bytes, merges, specials, unused control tokens up to `n_vocab`."""
    plain = _byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]
    n_unused = n_vocab - len(plain) - len(SPECIAL)
    if n_unused < 0:
        raise ValueError(f"n_vocab must be at least {n_vocab - n_unused}, not {n_vocab}")
    tokens = plain + list(SPECIAL) + [f"<|unused_{i}|>" for i in range(n_unused)]
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    return tokens, [normal] * len(plain) + [control] * (n_vocab - len(plain))


def token_id(text: str, n_vocab: int = 320) -> int:
    """Id of one token by its text in the vocabulary, e.g. `token_id("<|im_end|>")`."""
    return _vocabulary(n_vocab)[0].index(text)


def letter_ids(n_vocab: int = 320) -> list[int]:
    """Ids of the 16 letters a target mostly says, by letter code."""
    return [token_id(letter.replace(" ", "Ġ"), n_vocab) for letter in LETTERS]


def _tokenizer_keys(n_vocab: int, pre: str, chat_template: str | None) -> Keys:
    tokens, types = _vocabulary(n_vocab)
    keys: Keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    return keys if chat_template is None else keys | {"tokenizer.chat_template": chat_template}


def vocabulary_with(special: Mapping[str, gguf.TokenType], n_vocab: int = 320) -> Keys:
    """GGUF keys of a vocabulary in which unused tokens have these names and types."""
    tokens, types = _vocabulary(n_vocab)
    for n, (name, kind) in enumerate(special.items()):
        unused = tokens.index(f"<|unused_{n}|>")
        tokens[unused], types[unused] = name, int(kind)
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def sentencepiece(n_vocab: int = 320) -> Keys:
    """GGUF keys of a SentencePiece vocabulary that puts a space before text: bytes, letters and a few pieces."""
    kind = gguf.TokenType
    special = {"<unk>": kind.UNKNOWN, "<s>": kind.CONTROL, "</s>": kind.CONTROL, "<|user|>": kind.CONTROL}
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁s", "▁t", "▁to", "▁e", "ay", "▁say", "nd", "▁end"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [*special.values(), *[kind.BYTE] * 256, *[kind.NORMAL] * len(pieces)]
    n_unused = n_vocab - len(tokens)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + [f"<|unused_{i}|>" for i in range(n_unused)],
        "tokenizer.ggml.token_type": [*map(int, types), *[int(kind.CONTROL)] * n_unused],
        "tokenizer.ggml.scores": [float(len(token)) for token in tokens] + [0.0] * n_unused,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }


# --- target


def write_target(
    path: str | Path,
    arch: str = "llama",
    *,
    n_embd: int = 288,
    n_layer: int = 4,
    n_vocab: int = 320,
    n_ctx_train: int = 4096,
    seed: int = 0,
    context: float = 1.0,
    eog_bias: float = -12.0,
    pre: str = "smollm",
    chat_template: str | None = CHATML,
    overrides: Mapping[str, Any] | None = None,
    drop_keys: Collection[str] = (),
    drop_tensors: Collection[str] = (),
) -> Path:
    """Write a target: `llama`, `qwen3`, `qwen35` (hybrid, M-RoPE), `muse-glimmer` (three of four layers see a window
    of 16 tokens), `mamba` (recurrent only, cannot be drafted for), or one whose layer inputs llama.cpp does not hand
    out: `qwen2`, `gemma3`, `phi3`, `granite`, `olmo2`, `mistral3`.

    `context` says how far the layers bend the bigram: 0 never, 1 every few tokens, 2 chaos.
    `eog_bias` moves the logit of the control tokens: -12 they are never said, above 0 an answer
    ends by itself. `overrides` replaces or adds GGUF keys.
    """
    rng = np.random.default_rng(seed)
    bend = 0.5 * context
    keys = _shape_keys(arch, n_embd, n_layer, n_ctx_train) | _arch_keys(arch, n_embd)
    tensors = _outer_tensors(rng, n_embd, n_vocab, eog_bias)
    for layer in range(n_layer):
        tensors |= _numbered(layer, _block(rng, arch, keys, layer, bend))
    keys |= _tokenizer_keys(n_vocab, pre, chat_template)
    return _write(path, keys, tensors, overrides, drop_keys, drop_tensors)


def _shape_keys(arch: str, n_embd: int, n_layer: int, n_ctx_train: int) -> Keys:
    return {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        "general.file_type": FILE_TYPE_F32,
        f"{arch}.context_length": n_ctx_train,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layer,
        f"{arch}.feed_forward_length": 64,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.value_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": HEAD_DIM,
    }


def _arch_keys(arch: str, n_embd: int) -> Keys:
    if arch in WIDE:
        n_head = {f"{arch}.attention.head_count": n_embd // HEAD_DIM}
        return n_head | {"general.name": "tiny"}  # of one called phi3 llama.cpp expects phi3's special tokens
    if arch == "granite":
        return {"granite.logit_scale": 1.0}
    if arch == "qwen35":  # as the real one: a quarter of the layers attends, half of each head is rotated
        return {
            "qwen35.rope.dimension_count": HEAD_DIM // 2,
            "qwen35.rope.dimension_sections": [3, 3, 2, 0],
            "qwen35.full_attention_interval": 4,
            "qwen35.ssm.conv_kernel": 4,
            "qwen35.ssm.state_size": HEAD_DIM,
            "qwen35.ssm.group_count": 1,
            "qwen35.ssm.time_step_rank": 2,
            "qwen35.ssm.inner_size": 2 * HEAD_DIM,
        }
    if arch == "muse-glimmer":
        return {"muse-glimmer.attention.sliding_window": 16, "muse-glimmer.logit_scale": 1.0}
    if arch == "mamba":
        return {
            "mamba.feed_forward_length": 0,
            "mamba.attention.head_count": 0,
            "mamba.attention.head_count_kv": 0,
            "mamba.ssm.conv_kernel": 4,
            "mamba.ssm.inner_size": 2 * n_embd,
            "mamba.ssm.state_size": 16,
            "mamba.ssm.time_step_rank": 8,
        }
    if arch in ("llama", "qwen3", "gemma3", "mistral3"):
        return {}
    raise ValueError(f"no tiny target of architecture {arch!r}")


def _outer_tensors(rng: np.random.Generator, n_embd: int, n_vocab: int, eog_bias: float) -> Tensors:
    """Embeddings `[constant, 16 codes, noise]`; the head reads code a as letter next_code(a)."""
    codes = np.arange(n_vocab) % N_CODES
    letters = letter_ids(n_vocab)
    codes[letters] = np.arange(N_CODES)
    embd = 0.5 * rng.standard_normal((n_vocab, n_embd))
    embd[:, : 1 + N_CODES] = 0.0
    embd[:, 0] = 4.0
    embd[np.arange(n_vocab), 1 + codes] = 4.0
    embd[token_id("<|mask|>", n_vocab), 1:] = 0.0  # a mask slot says nothing by itself
    head = 0.12 * rng.standard_normal((n_vocab, n_embd))
    head[:, 0] = 0.0
    for code in range(N_CODES):
        head[letters[next_code(code)], 1 + code] += 2.0
    n_plain = 256 + len(MERGES)
    head[n_plain:, 0] = eog_bias / 6.0  # the constant reads about 6 after the last norm
    return {"token_embd.weight": embd, "output.weight": head, "output_norm.weight": np.ones(n_embd)}


def _matrix(rng: np.random.Generator, n_out: int, n_in: int, scale: float = 1.0) -> Array:
    matrix: Array = rng.standard_normal((n_out, n_in)) * (scale / np.sqrt(n_in))
    return matrix


def _block(rng: np.random.Generator, arch: str, keys: Keys, layer: int, context: float) -> Tensors:
    """One decoder layer; `context` scales what it adds to the residual stream."""
    n_embd, n_ff = keys[f"{arch}.embedding_length"], keys[f"{arch}.feed_forward_length"]
    if arch == "mamba":
        return _mamba(rng, n_embd, context)
    if arch == "qwen35" and (layer + 1) % keys["qwen35.full_attention_interval"]:
        mixer = _delta_net(rng, n_embd, context)
    else:
        mixer = _attention(rng, arch, n_embd, keys[f"{arch}.attention.head_count"], context)
    norms = {f"{name}.weight": np.ones(n_embd) for name in PRE_NORMS.get(arch, ("attn_norm", "ffn_norm"))}
    if arch in POST_NORMS:  # what a layer adds is as loud as these say, beside embeddings of about 1
        loud = context * {"gemma3": np.sqrt(n_embd), "muse-glimmer": 3.0}.get(arch, 1.0)
        norms |= {f"post_{name}_norm.weight": np.full(n_embd, 0.3 * loud) for name in ("attention", "ffw")}
    feed_forward = {
        "ffn_gate.weight": _matrix(rng, n_ff, n_embd),
        "ffn_up.weight": _matrix(rng, n_ff, n_embd),
        "ffn_down.weight": _matrix(rng, n_embd, n_ff, context),
    }
    if arch == "phi3":  # both in one
        feed_forward["ffn_up.weight"] = np.concatenate(
            [feed_forward.pop("ffn_gate.weight"), feed_forward["ffn_up.weight"]]
        )
    return mixer | norms | feed_forward


def _attention(rng: np.random.Generator, arch: str, n_embd: int, n_head: int, context: float) -> Tensors:
    n_q = n_head * HEAD_DIM
    has_gate, has_norms = arch == "qwen35", arch in ("qwen3", "qwen35", "muse-glimmer", "gemma3", "olmo2")
    tensors = {
        "attn_q.weight": _matrix(rng, n_q * (2 if has_gate else 1), n_embd, 3.0),
        "attn_k.weight": _matrix(rng, HEAD_DIM, n_embd),
        "attn_v.weight": _matrix(rng, HEAD_DIM, n_embd),
        "attn_output.weight": _matrix(rng, n_embd, n_q, context),
    }
    if arch == "muse-glimmer":
        tensors["attn_gate.weight"] = _matrix(rng, n_q, n_embd)
    n_norm = n_q if arch == "olmo2" else HEAD_DIM  # over all heads or each
    norms = {"attn_q_norm.weight": np.full(n_norm, 3.0), "attn_k_norm.weight": np.ones(HEAD_DIM)}
    return tensors | norms if has_norms else tensors


def _delta_net(rng: np.random.Generator, n_embd: int, context: float) -> Tensors:
    """The gated delta net of qwen35: one key head, two value heads, convolution over 4 tokens."""
    n_value = 2 * HEAD_DIM
    n_qkv = 2 * HEAD_DIM + n_value
    return {
        "attn_qkv.weight": _matrix(rng, n_qkv, n_embd),
        "attn_gate.weight": _matrix(rng, n_value, n_embd),
        "ssm_conv1d.weight": 0.5 * rng.standard_normal((n_qkv, 4)),
        "ssm_dt.bias": rng.uniform(-3.0, -1.0, 2),
        "ssm_a": -rng.uniform(0.5, 2.0, 2),
        "ssm_beta.weight": _matrix(rng, 2, n_embd),
        "ssm_alpha.weight": _matrix(rng, 2, n_embd),
        "ssm_norm.weight": np.ones(HEAD_DIM),
        "ssm_out.weight": _matrix(rng, n_embd, n_value, context),
    }


def _mamba(rng: np.random.Generator, n_embd: int, context: float) -> Tensors:
    """A layer of mamba: a selective scan with a state of 16 numbers a channel, and nothing else."""
    n_inner, n_state, n_rank = 2 * n_embd, 16, 8
    return {
        "attn_norm.weight": np.ones(n_embd),
        "ssm_in.weight": _matrix(rng, 2 * n_inner, n_embd),
        "ssm_conv1d.weight": 0.5 * rng.standard_normal((n_inner, 4)),
        "ssm_conv1d.bias": np.zeros(n_inner),
        "ssm_x.weight": _matrix(rng, n_rank + 2 * n_state, n_inner),
        "ssm_dt.weight": _matrix(rng, n_inner, n_rank),
        "ssm_dt.bias": rng.uniform(-3.0, -1.0, n_inner),
        "ssm_a": -rng.uniform(0.5, 2.0, (n_inner, n_state)),
        "ssm_d": np.ones(n_inner),
        "ssm_out.weight": _matrix(rng, n_embd, n_inner, 2.0 * context),
    }


# --- drafter


def write_drafter(
    path: str | Path,
    target_path: str | Path,
    *,
    version: int = 2,
    arch: str = "dflash",
    n_layer: int = 1,
    block_size: int = 8,
    target_layers: Sequence[int] | None = None,
    good: bool = True,
    seed: int = 1,
    n_kept_vocab: int | None = None,
    own_embeddings: bool = False,
    mrope: bool = False,
    sliding_window: int | None = None,
    causal: bool | None = None,
    top_k: int = 16,
    rank: int = 32,
    conv_kernel: int = 2,
    conv_group: int = 16,
    overrides: Mapping[str, Any] | None = None,
    drop_keys: Collection[str] = (),
    drop_tensors: Collection[str] = (),
    replace_tensors: Mapping[str, Array] | None = None,
) -> Path:
    """Write a DFlash drafter (`version` 1 or 2) for the tiny target at `target_path`.

    `target_layers` are GGUF layer ids (layer inputs; default 1 and the last); `n_kept_vocab` gives
    it a reduced head with `d2t`; `sliding_window` types every layer as sliding; `causal=None`
    leaves the key out. For broken files: `overrides`, `drop_keys`, `drop_tensors`, `replace_tensors`, and
    `arch` (e.g. a fork's "dflash-draft").
    """
    rng = np.random.default_rng(seed)
    target = _Target(target_path)
    n_embd, n_target_layer = target.shape("embedding_length"), target.shape("block_count")
    layers = list(target_layers or sorted({1, n_target_layer - 1}))
    keys = _shape_keys(arch, n_embd, n_layer, target.shape("context_length")) | {
        f"{arch}.attention.head_count": block_size,
        f"{arch}.rope.freq_base": 4.0,  # high frequencies tell distances apart
        f"{arch}.block_size": block_size,
        f"{arch}.target_layers": layers,
        "tokenizer.ggml.mask_token_id": target.tokens.index("<|mask|>"),
    }
    keys |= _attention_keys(arch, n_layer, mrope, sliding_window, causal)
    tensors = _fusion(rng, n_embd, len(layers), good)
    tensors |= _own_tensors(target, n_kept_vocab, own_embeddings)
    for i in range(n_layer):
        tensors |= _numbered(i, (_good_layer if good else _random_layer)(rng, n_embd, block_size, i))
    if version == 2:
        keys |= {f"{arch}.conv_kernel_size": conv_kernel, f"{arch}.conv_group_size": conv_group}
        keys |= {f"{arch}.selector_rank": rank, f"{arch}.selector_top_k": top_k}
        for i in range(n_layer):
            tensors |= _numbered(i, _convolutions(rng, n_embd, conv_kernel, conv_group, good))
        tensors |= _selector(rng, n_embd, len(target.tokens), rank)
    tensors |= replace_tensors or {}
    return _write(path, target.tokenizer | keys, tensors, overrides, drop_keys, drop_tensors)


def _numbered(layer: int, tensors: Tensors) -> Tensors:
    return {f"blk.{layer}.{name}": tensor for name, tensor in tensors.items()}


def _attention_keys(arch: str, n_layer: int, mrope: bool, sliding_window: int | None, causal: bool | None) -> Keys:
    keys: Keys = {}
    if mrope:  # as the converter writes it: the temporal section only
        keys[f"{arch}.rope.dimension_sections"] = [HEAD_DIM // 2, 0, 0, 0]
    if sliding_window is not None:
        keys[f"{arch}.attention.sliding_window"] = sliding_window
        keys[f"{arch}.attention.sliding_window_pattern"] = [True] * n_layer
    if causal is not None:
        keys[f"{arch}.attention.causal"] = causal
    return keys


def _random_layer(rng: np.random.Generator, n_embd: int, n_head: int, layer: int) -> Tensors:
    n_q, n_ff = n_head * HEAD_DIM, 64
    return {
        "attn_norm.weight": np.ones(n_embd),
        "attn_q.weight": _matrix(rng, n_q, n_embd),
        "attn_k.weight": _matrix(rng, HEAD_DIM, n_embd),
        "attn_v.weight": _matrix(rng, HEAD_DIM, n_embd),
        "attn_output.weight": _matrix(rng, n_embd, n_q),
        "attn_q_norm.weight": np.full(HEAD_DIM, 2.0),
        "attn_k_norm.weight": np.ones(HEAD_DIM),
        "ffn_norm.weight": np.ones(n_embd),
        "ffn_gate.weight": _matrix(rng, n_ff, n_embd),
        "ffn_up.weight": _matrix(rng, n_ff, n_embd),
        "ffn_down.weight": _matrix(rng, n_embd, n_ff),
    }


def _good_layer(rng: np.random.Generator, n_embd: int, n_head: int, layer: int) -> Tensors:
    """Layer 0: head k attends k positions back and adds the code k - 1 steps after the one there.

    Every key is the same vector u before rotation, so a score depends on the distance alone: q_k,
    u turned back by k positions, gives sum_i cos(theta_i (distance - k)), which peaks at k. Masks
    and injected positions carry no code: only the anchor speaks. Later layers add next to nothing.
    """
    tensors = _random_layer(rng, n_embd, n_head, layer)
    tensors["ffn_down.weight"] *= 0.01
    if layer > 0:
        tensors["attn_output.weight"] *= 0.01
        return tensors
    half = HEAD_DIM // 2
    theta = 4.0 ** (-np.arange(half) / half)
    q, k, v = (np.zeros_like(tensors[f"attn_{name}.weight"]) for name in "qkv")
    output = np.zeros_like(tensors["attn_output.weight"])
    k[:half, 0] = 1.0
    v[:N_CODES, 1 : 1 + N_CODES] = np.eye(N_CODES)
    for head in range(n_head):
        first = head * HEAD_DIM
        q[first : first + half, 0] = np.cos(theta * head)
        q[first + half : first + HEAD_DIM, 0] = -np.sin(theta * head)
        for code in range(N_CODES if head else 0):  # head 0 would look at its own slot
            output[1 + next_code(code, head - 1), first + code] = 1.0
    sharp = {f"attn_{name}_norm.weight": np.full(HEAD_DIM, 8.0) for name in "qk"}
    named = zip(("q", "k", "v", "output"), (q, k, v, output), strict=True)
    return tensors | sharp | {f"attn_{name}.weight": tensor for name, tensor in named}


def _fusion(rng: np.random.Generator, n_embd: int, n_target_layers: int, good: bool) -> Tensors:
    """fc and the two norms; the good drafter takes only the constant out of the features."""
    fc = _matrix(rng, n_embd, n_target_layers * n_embd)
    if good:
        fc[: 1 + N_CODES] = 0.0
        fc[0, 0] = 4.0
    return {
        "fc.weight": fc,
        "enc.output_norm.weight": np.ones(n_embd),
        "output_norm.weight": np.ones(n_embd),
    }


def _own_tensors(target: _Target, n_kept_vocab: int | None, own_embeddings: bool) -> Tensors:
    """What is not borrowed through ctx_other: embeddings, and the head, whole or reduced."""
    embd, head = target.tensor("token_embd.weight"), target.tensor("output.weight")
    tensors: Tensors = {"token_embd.weight": embd} if own_embeddings else {}
    if n_kept_vocab is not None:
        letters = letter_ids(len(target.tokens))
        others = [i for i in range(len(target.tokens)) if i not in letters]
        kept = np.sort(np.array((letters + others)[:n_kept_vocab], dtype=np.int64))
        return tensors | {"d2t": kept, "output.weight": head[kept]}
    return tensors | {"output.weight": head} if own_embeddings else tensors


def _convolutions(rng: np.random.Generator, n_embd: int, kernel: int, group: int, good: bool) -> Tensors:
    """Near the identity (tap 0 is 1); only a random drafter has loud taps and coefficients."""
    scale = 0.01 if good else 0.3
    tensors: Tensors = {}
    for part in ("attn", "ffn"):
        base = 0.1 * scale * rng.standard_normal((2, kernel, n_embd))
        base[:, 0] += 1.0
        tensors[f"{part}_conv_base"] = base
        tensors[f"{part}_conv_proj.weight"] = _matrix(rng, 2 * kernel * n_embd // group, n_embd, scale)
    return tensors


def _selector(rng: np.random.Generator, n_embd: int, n_vocab: int, rank: int) -> Tensors:
    """Pair scores of about one logit: they show in the lattice and hardly move a clear choice."""
    return {
        "selector_predecessor.weight": _matrix(rng, n_vocab, rank),
        "selector_successor.weight": rng.standard_normal((n_vocab, rank)),
        "selector_hidden.weight": _matrix(rng, rank, n_embd),
    }


# --- files


class _Target:
    """The parts of a written target that its drafters copy."""

    def __init__(self, path: str | Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields: Keys = {name: field.contents() for name, field in reader.fields.items()}
        self.arch: str = self.fields["general.architecture"]
        self.tokens: list[str] = self.fields["tokenizer.ggml.tokens"]
        self.tokenizer = {k: v for k, v in self.fields.items() if k.startswith("tokenizer.")}
        self._tensors = {t.name: np.array(t.data) for t in reader.tensors}

    def shape(self, name: str) -> int:
        return int(self.fields[f"{self.arch}.{name}"])

    def tensor(self, name: str) -> Array:
        return self._tensors[name]


def _write(
    path: str | Path,
    keys: Keys,
    tensors: Tensors,
    overrides: Mapping[str, Any] | None,
    drop_keys: Collection[str],
    drop_tensors: Collection[str],
) -> Path:
    keys = {name: value for name, value in (keys | dict(overrides or {})).items() if name not in drop_keys}
    writer = gguf.GGUFWriter(path, str(keys.pop("general.architecture", "")))
    for name, value in keys.items():
        writer.add_key_value(name, value, _value_type(value))
    for name, tensor in tensors.items():
        if name not in drop_tensors:
            writer.add_tensor(name, tensor if tensor.dtype == np.int64 else tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _value_type(value: object) -> gguf.GGUFValueType:
    """llama.cpp reads counts and ids as unsigned; the package would guess signed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)


def truncate(path: str | Path, n_bytes: int) -> Path:
    """Cut a file to its first `n_bytes` bytes, as a broken download leaves it."""
    with Path(path).open("r+b") as file:
        file.truncate(n_bytes)
    return Path(path)
