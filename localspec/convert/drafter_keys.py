"""What a drafter's config.json says, as sizes and as the keys of a GGUF file.

Every key is asked for, so that `Config.left` names those that are not accounted for.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.convert.checkpoint import Config
from localspec.dflash.format import MAX_BLOCK, MAX_LAYERS, Keys, size_keys
from localspec.errors import ModelError

# Keys without influence on the forward pass.
IGNORED = frozenset(
    """architectures model_type auto_map dtype torch_dtype transformers_version _name_or_path initializer_range
    attention_dropout use_cache max_window_layers bos_token_id eos_token_id pad_token_id num_anchors loss_decay_gamma
    backbone_rotary_base projector_type runtime_block_size original_max_position_embeddings""".split()  # noqa: SIM905
)
# Keys with one value that llama.cpp's graph can honour.
FIXED = {
    "attention_bias": False,
    "has_embed_tokens": True,
    "hidden_act": "silu",
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "sample_from_anchor": False,
    "use_aux_hidden_state": True,
}


@dataclass(frozen=True)
class Shape:
    """The sizes in a drafter's config.json; `target_layers` as GGUF counts them."""

    n_embd: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_rows: int  # of the head; fewer than n_vocab where there is a d2t table
    target_layers: tuple[int, ...]
    mask_token: int
    block_size: int
    tied: bool  # its own embeddings, if it has any, are its head
    sinks: bool  # every head of every layer has an attention sink
    dflash2: bool
    conv_taps: int = 0  # this and what follows: of DFlash 2
    conv_group: int = 0
    selector_rank: int = 0
    top_k: int = 0

    @classmethod
    def read(cls, config: Config, *, dflash2: bool) -> Shape:
        dflash = config.section("dflash_config")
        n_embd, n_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
        layers = dflash.get("target_layer_ids", config.get("target_layer_ids", None))
        if not isinstance(layers, list) or not layers or any(type(i) is not int or i < 0 for i in layers):
            raise ModelError(f"{config.name} has {layers!r} as 'target_layer_ids'; a list of layers belongs there.")
        names = {
            "conv_taps": "conv_kernel_size",
            "conv_group": "conv_group_size",
            "selector_rank": "selector_rank",
            "top_k": "selector_top_k",
        }
        shape = cls(
            n_embd=n_embd,
            n_layers=config.whole("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=config.whole("num_key_value_heads", n_heads),
            head_dim=config.whole("head_dim", n_embd // max(n_heads, 1)),
            n_ff=config.whole("intermediate_size"),
            n_vocab=config.whole("vocab_size"),
            n_rows=config.whole("draft_vocab_size", config.whole("vocab_size")),
            # Checkpoints name the layers whose output is read, llama.cpp those whose input it is: the next ones.
            target_layers=tuple(layer + 1 for layer in layers),
            mask_token=_either(dflash, config, "mask_token_id"),
            block_size=_either(dflash, config, "block_size"),
            tied=config.get("tie_word_embeddings", False) is True,
            sinks=dflash.get("attention_sink_bias", False) is True,
            dflash2=dflash2,
            **{ours: dflash.whole(theirs) for ours, theirs in names.items() if dflash2},
        )
        shape.check(config.name)
        return shape

    def check(self, name: str) -> None:
        """ModelError for sizes that llama.cpp would stumble over."""
        layers, n_scores = [layer - 1 for layer in self.target_layers], self.top_k * (self.top_k + 1)
        rules = [
            (0 < self.n_layers <= MAX_LAYERS, f"num_hidden_layers is {self.n_layers} instead of 1 to {MAX_LAYERS}"),
            (_divides(self.n_kv_heads, self.n_heads), f"{self.n_heads} heads do not divide among {self.n_kv_heads}"),
            (_divides(2, self.head_dim), f"a head_dim of {self.head_dim} cannot be rotated in pairs"),
            (len(set(layers)) == len(layers), f"target_layer_ids {layers} names a layer twice"),
            (2 <= self.block_size <= MAX_BLOCK, f"block_size is {self.block_size} instead of 2 to {MAX_BLOCK}"),
            (self.mask_token < self.n_vocab, f"mask_token_id is {self.mask_token}, vocab_size {self.n_vocab}"),
            (0 < self.n_rows <= self.n_vocab, f"draft_vocab_size is {self.n_rows}, vocab_size {self.n_vocab}"),
        ]
        if self.dflash2:
            group, k = self.conv_group, self.top_k
            rules += [
                (_divides(group, self.n_embd), f"conv_group_size {group} does not divide hidden_size {self.n_embd}"),
                (self.conv_taps > 0 and self.selector_rank > 0, "conv_kernel_size or selector_rank is 0"),
                (0 < k <= self.n_rows, f"selector_top_k is {k}, of {self.n_rows} tokens"),
                (n_scores <= self.n_embd, f"hidden_size is {self.n_embd}, selector_top_k {k} needs {n_scores} or more"),
            ]
        if broken := [complaint for holds, complaint in rules if not holds]:
            raise ModelError(f"{name} cannot be converted: {broken[0]}.")


def _divides(part: int, whole: int) -> bool:
    return 0 < part <= whole and whole % part == 0


def _either(dflash: Config, config: Config, key: str) -> int:
    """A whole number of dflash_config, where DFlash 2 has it, or of config.json itself, where DFlash 1 has it."""
    outer: int = config.whole(key, 0)  # asked for in any case: it may stand in both
    inner: int = outer if key in config and key not in dflash else dflash.whole(key)
    return inner


def keys_of(config: Config, shape: Shape, *, mrope: bool, embedding_scale: float) -> Keys:
    """The keys `dflash.*`.

    Args:
        mrope: whether the target gives each token several positions.
        embedding_scale: what the target's graph multiplies its embeddings by before anything reads them.

    Raises:
        ModelError: a key is missing or has a value that llama.cpp could not honour.
    """
    dflash = config.section("dflash_config")
    for key, value in FIXED.items():
        config.only(key, value)
        dflash.only(key, value)
    config.only("v_head_dim", shape.head_dim)
    counts = size_keys(shape, n_ctx_train=config.whole("max_position_embeddings"), dflash2=shape.dflash2)
    counts["attention.layer_norm_rms_epsilon"] = config.real("rms_norm_eps")
    parts = _rope_keys(config, shape, mrope) | _attention_keys(config, shape) | _scale_keys(config, embedding_scale)
    return {f"dflash.{name}": value for name, value in (counts | parts).items()}


def _rope_keys(config: Config, shape: Shape, mrope: bool) -> Keys:
    rope = config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    outer = config.real("rope_theta", 0.0)  # asked for in any case: it may stand in both
    keys: Keys = {"rope.freq_base": rope.real("rope_theta") if "rope_theta" in rope or not outer else outer}
    # What leaks here from the target: a drafter rotates its whole heads, by the position in time only.
    for leaked in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.get(leaked, None)
    if "partial_rotary_factor" in config:
        keys["rope.dimension_count"] = n_rotated = int(shape.head_dim * config.real("partial_rotary_factor"))
        if not _divides(2, n_rotated) or n_rotated > shape.head_dim:
            raise ModelError(f"{config.name} wants {n_rotated} of {shape.head_dim} floats rotated in pairs.")
    if mrope:
        keys["rope.dimension_sections"] = [shape.head_dim // 2, 0, 0, 0]
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.only("type", kind)
    rope.only("rope_type", "default", "yarn")
    return keys | _yarn_keys(rope) if kind == "yarn" else keys


def _yarn_keys(rope: Config) -> Keys:
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope.real("factor"),
        "rope.scaling.original_context_length": rope.whole("original_max_position_embeddings"),
    }
    optional = {
        "extrapolation_factor": "ext_factor",
        "attention_factor": "attn_factor",
        "attn_factor": "attn_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    }
    found = {ours: rope.real(theirs) for theirs, ours in optional.items() if theirs in rope}
    return keys | {f"rope.scaling.yarn_{name}": value for name, value in found.items()}


def _attention_keys(config: Config, shape: Shape) -> Keys:
    dflash = config.section("dflash_config")
    keys: Keys = {}
    if "attention_value_scale" in dflash:
        keys["attention.value_scale"] = dflash.real("attention_value_scale")
    everywhere, inner = config.get("is_causal", None), dflash.get("causal", None)
    causal = inner if everywhere is None else everywhere
    if causal not in (None, False, True):
        raise ModelError(f"{config.name} has {causal!r} as 'is_causal'; true or false belongs there.")
    if causal is not None:
        keys["attention.causal"] = bool(causal)
    window = dflash.whole("swa_window_size", config.whole("sliding_window", 0))
    sliding = _sliding_layers(config, shape.n_layers)
    if not any(sliding):
        return keys
    if not window:
        raise ModelError(f"{config.name} has layers of 'sliding_attention' but no 'sliding_window'.")
    return keys | {"attention.sliding_window": window, "attention.sliding_window_pattern": sliding}


def _sliding_layers(config: Config, n_layers: int) -> list[bool]:
    """Which layers see a window of the context only; those of `use_swa` all do unless they have types of their own."""
    kinds, types = ("full_attention", "sliding_attention"), config.get("layer_types", None)
    fits = isinstance(types, list) and len(types) == n_layers and all(kind in kinds for kind in types)
    if types is not None and not fits:
        raise ModelError(f"{config.name} has {types!r} as 'layer_types'; {n_layers} of {kinds} belong there.")
    everywhere = config.section("dflash_config").get("use_swa", False)
    switched_on = config.get("use_sliding_window", False)
    sliding = [kind == kinds[1] for kind in types or []]
    if everywhere:
        return sliding if any(sliding) else [True] * n_layers
    if any(sliding) and not switched_on:
        raise ModelError(
            f"{config.name} has layers of 'sliding_attention' but not 'use_sliding_window': true; one is wrong."
        )
    if switched_on and types is None:
        raise ModelError(f"{config.name} has 'use_sliding_window' but no 'layer_types', which say where.")
    return sliding


def _scale_keys(config: Config, multiplier: float) -> Keys:
    dflash = config.section("dflash_config")
    found = {
        key: (dflash if key in dflash else config).real(key, 0.0)
        for key in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
    }
    scale = (found["input_embedding_scale"] or 1.0) * multiplier
    keys: Keys = {
        "logit_scale": found["output_multiplier"],
        "final_logit_softcapping": found["final_logit_softcapping"],
        "embedding_scale": 0.0 if scale == 1.0 else scale,
    }
    return {name: value for name, value in keys.items() if value}
