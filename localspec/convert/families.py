"""What a checkpoint of each architecture holds, and what llama.cpp calls it.

Sources: llama.cpp's src/models/{llama,qwen3,qwen3moe,qwen35}.cpp and conversion/, transformers' modeling files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from localspec.convert.checkpoint import Checkpoint, Config
from localspec.convert.shard import Array
from localspec.convert.writer import Tensor
from localspec.dflash.format import MAX_LAYERS
from localspec.errors import ModelError

Change = Callable[[Array], Array]
Shape = tuple[int, ...]
Items = Iterator[tuple[str, str, Shape] | tuple[str, str, Shape, Change]]
"""Name in the checkpoint, name in the GGUF file, shape in the checkpoint, and what is done to the whole tensor."""

# Keys of config.json that say nothing about the forward pass, or that the vocabulary is made from.
IGNORED = frozenset(
    (
        *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "transformers.js_config"),
        *("dtype", "torch_dtype", "mamba_ssm_dtype", "use_cache", "initializer_range", "pretraining_tp"),
        *("attention_dropout", "output_router_logits", "router_aux_loss_coef", "is_llama_config", "max_window_layers"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "image_token_id", "video_token_id"),
        *("vision_config", "vision_start_token_id", "vision_end_token_id", "language_model_only"),
        *("unsloth_version", "unsloth_fixed", "unsloth_fixed_mtp", "chat_template"),
    )
)


class Family:
    """A dense decoder: embeddings, layers of attention and MLP, norm, head. Subclasses say what differs.

    `text` is the part of the configuration that describes the language model, `root` the name in front of its tensors.
    """

    arch: str
    usual_theta = 0.0  # of the rope where config.json is silent; 0: it must not be
    ropes: tuple[str, ...] = ("default", "linear", "yarn")

    def __init__(self, checkpoint: Checkpoint, text: Config, root: str = "model.") -> None:
        self.checkpoint, self.config, self.root = checkpoint, text, root
        self.n_vocab, self.n_embd = text.whole("vocab_size"), text.whole("hidden_size")
        self.n_layer, self.n_ff = text.whole("num_hidden_layers"), text.whole("intermediate_size")
        self.n_head, self.n_ctx = text.whole("num_attention_heads"), text.whole("max_position_embeddings")
        self.n_head_kv = text.whole("num_key_value_heads", self.n_head)
        self.head_dim = text.whole("head_dim", self.n_embd // max(self.n_head, 1))
        self.rope = text.section("rope_parameters" if "rope_parameters" in text else "rope_scaling")
        self.rope_theta = self.rope.real("rope_theta", text.real("rope_theta", self.usual_theta))
        self.rope_type = self.rope.get("rope_type", self.rope.get("type", "default"))
        self._refuse()

    def _refuse(self) -> None:
        """ModelError for what llama.cpp's graph cannot do."""
        sizes = (self.n_vocab, self.n_embd, self.n_layer, self.n_ff, self.n_head, self.n_head_kv, self.head_dim)
        if 0 in (*sizes, self.n_ctx):
            raise ModelError(f"{self.config.name} describes a model without layers, width, heads or context.")
        if self.n_layer > MAX_LAYERS:
            raise ModelError(f"{self.config.name} claims {self.n_layer:,} layers; llama.cpp takes up to {MAX_LAYERS}.")
        if self.n_head % self.n_head_kv:
            raise ModelError(f"{self.config.name} has {self.n_head} heads for {self.n_head_kv} key-value heads.")
        if self.rope_theta <= 0:
            raise ModelError(
                f"{self.config.name} has {self.rope_theta} as 'rope_theta'; a number above 0 belongs there."
            )
        self.config.only("hidden_act", "silu", "swish")
        for key in ("attention_bias", "mlp_bias", "rope_interleaved", "use_sliding_window"):
            self.config.only(key, False)
        if self.rope_type not in self.ropes:
            known = ", ".join(self.ropes)
            raise ModelError(
                f"{self.rope.name} is of type {self.rope_type!r}; for {self.arch} localspec knows {known}."
            )

    def _layer_types(self, usual: list[str], *known: str) -> list[str]:
        """What each layer is, `usual` where config.json is silent."""
        kinds = self.config.get("layer_types", usual)
        if not isinstance(kinds, list) or len(kinds) != self.n_layer or any(kind not in known for kind in kinds):
            raise ModelError(
                f"{self.config.name} has {str(kinds)[:200]} as 'layer_types'; for {self.arch} it takes {self.n_layer} "
                f"of {' or '.join(known)}."
            )
        return kinds

    # ---- keys

    def keys(self) -> dict[str, Any]:
        """The keys `{arch}.*` by their names: whole numbers, floats, truth values, texts or lists."""
        config = self.config
        config.get("sliding_window", 0)  # means nothing while use_sliding_window is off
        keys: dict[str, Any] = {
            "block_count": self.n_layer,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon": config.real("rms_norm_eps"),
            "rope.freq_base": self.rope_theta,
        }
        if "head_dim" in config:
            keys |= {"attention.key_length": self.head_dim, "attention.value_length": self.head_dim}
        return keys | self._rope_keys()

    def _rope_keys(self) -> dict[str, Any]:
        if self.rope_type not in ("linear", "yarn"):
            return {}
        keys = {"rope.scaling.type": self.rope_type, "rope.scaling.factor": self.rope.real("factor")}
        if keys["rope.scaling.factor"] <= 0:
            raise ModelError(f"{self.rope.name} has {self.rope.real('factor')} as 'factor'; it must be above 0.")
        if self.rope_type == "yarn":
            n_ctx = self.config.whole("original_max_position_embeddings", 0)
            keys["rope.scaling.original_context_length"] = self.rope.whole("original_max_position_embeddings", n_ctx)
            for beta in ("beta_fast", "beta_slow"):
                if beta in self.rope:
                    keys[f"rope.scaling.yarn_{beta}"] = self.rope.real(beta)
        return keys

    # ---- tensors

    def tensors(self) -> list[Tensor]:
        """All tensors of the file, in order; each is read when it is written."""
        return [*self.extra(), *self._outer(), *(t for i in range(self.n_layer) for t in self.layer(i))]

    def extra(self) -> Iterator[Tensor]:
        """Tensors that are in no checkpoint."""
        yield from ()

    def _outer(self) -> Iterator[Tensor]:
        shape, embeddings = (self.n_vocab, self.n_embd), f"{self.root}embed_tokens.weight"
        yield self.tensor(embeddings, "token_embd.weight", shape)
        yield self.tensor(f"{self.root}norm.weight", "output_norm.weight", (self.n_embd,), self.norm)
        key, outer = "tie_word_embeddings", self.checkpoint.config
        self.config.only(key, False, True)
        outer.only(key, False, True)
        if not outer.get(key, self.config.get(key, False)):
            yield self.tensor("lm_head.weight", "output.weight", shape)
        elif "lm_head.weight" in self.checkpoint:
            self.expect("lm_head.weight", shape)
            self._check_tied(embeddings)

    def _check_tied(self, embeddings: str) -> None:
        """Some tied checkpoints hold their head a second time."""
        blocks = zip(self.checkpoint.blocks("lm_head.weight"), self.checkpoint.blocks(embeddings), strict=False)
        if not all(np.array_equal(head, embedding) for head, embedding in blocks):
            raise ModelError(
                f"{self.config.name} says that head and embeddings are one (tie_word_embeddings), but lm_head.weight "
                f"and {embeddings} differ; set it to false if the head is the model's own."
            )

    def layer(self, i: int) -> Iterator[Tensor]:
        for source, name, *rest in self.items(i):
            yield self.tensor(f"{self.root}layers.{i}.{source}", f"blk.{i}.{name}", *rest)

    def items(self, i: int) -> Items:
        """The tensors of layer `i`, names without the layer."""
        yield "input_layernorm.weight", "attn_norm.weight", (self.n_embd,)
        yield from self.attention()
        yield "post_attention_layernorm.weight", "ffn_norm.weight", (self.n_embd,)
        yield from self.mlp()

    def attention(self) -> Items:
        n_q, n_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        yield "self_attn.q_proj.weight", "attn_q.weight", (n_q, self.n_embd)
        yield "self_attn.k_proj.weight", "attn_k.weight", (n_kv, self.n_embd)
        yield "self_attn.v_proj.weight", "attn_v.weight", (n_kv, self.n_embd)
        yield "self_attn.o_proj.weight", "attn_output.weight", (self.n_embd, n_q)

    def mlp(self) -> Items:
        yield "mlp.gate_proj.weight", "ffn_gate.weight", (self.n_ff, self.n_embd)
        yield "mlp.up_proj.weight", "ffn_up.weight", (self.n_ff, self.n_embd)
        yield "mlp.down_proj.weight", "ffn_down.weight", (self.n_embd, self.n_ff)

    norm: Change | None = None
    """What is done to the weights of a norm."""

    def tensor(self, source: str, name: str, shape: Shape, change: Change | None = None) -> Tensor:
        """The tensor `name` out of `source`, which must have `shape`; a change sees it whole, others come in blocks."""
        self.expect(source, shape)
        if change is None:
            return Tensor(name, shape, lambda: self.checkpoint.blocks(source))
        becomes = tuple(n for n in shape if n != 1) if len(shape) > 2 else shape
        return Tensor(name, becomes, lambda: [change(self.checkpoint.tensor(source))])

    def expect(self, source: str, shape: Shape) -> None:
        """Tick a tensor off; ModelError where it is missing or of another shape."""
        if (found := self.checkpoint.shape(source)) != shape:
            raise ModelError(
                f"{source} has the shape {list(found)}, but {self.config.name} asks for {list(shape)}; they are of "
                "different models."
            )
        self.checkpoint.taken.add(source)


class Llama(Family):
    """LlamaForCausalLM: SmolLM2, Llama 3."""

    arch = "llama"
    usual_theta = 10000.0
    ropes = ("default", "linear", "yarn", "llama3")

    def keys(self) -> dict[str, Any]:
        return super().keys() | {"vocab_size": self.n_vocab, "rope.dimension_count": self.head_dim}

    def attention(self) -> Items:
        """llama.cpp rotates neighbours (0, 1), (2, 3) ..., transformers rotates halves: (0, d/2), (1, d/2 + 1) ..."""
        for source, name, shape, *_ in super().attention():
            if name in ("attn_q.weight", "attn_k.weight"):
                yield source, name, shape, self._neighbours
            else:
                yield source, name, shape

    def _neighbours(self, weight: Array) -> Array:
        halves = weight.reshape(-1, 2, self.head_dim // 2, self.n_embd)
        return halves.swapaxes(1, 2).reshape(weight.shape)

    def extra(self) -> Iterator[Tensor]:
        if self.rope_type == "llama3":
            yield Tensor.of("rope_freqs.weight", self._rope_factors())

    def _rope_factors(self) -> Array:
        """What Llama 3 divides each frequency by (transformers: modeling_rope_utils, `llama3`)."""
        factor, low, high = (self.rope.real(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        n_ctx = self.rope.whole("original_max_position_embeddings")
        if not 0 < low < high or factor <= 0:
            raise ModelError(f"{self.rope.name} has factors that make no sense: {factor}, {low} to {high}.")
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequencies = 1 / np.float32(self.rope_theta) ** exponents
        turns = n_ctx * frequencies / np.float32(2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


class Qwen3(Family):
    """Qwen3ForCausalLM: a norm on each query and key."""

    arch = "qwen3"

    def _refuse(self) -> None:
        super()._refuse()
        self._layer_types(["full_attention"] * self.n_layer, "full_attention")

    def attention(self) -> Items:
        yield from super().attention()
        yield "self_attn.q_norm.weight", "attn_q_norm.weight", (self.head_dim,)
        yield "self_attn.k_norm.weight", "attn_k_norm.weight", (self.head_dim,)


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM: every MLP is a choice of experts."""

    arch = "qwen3moe"

    def __init__(self, checkpoint: Checkpoint, text: Config, root: str = "model.") -> None:
        super().__init__(checkpoint, text, root)
        self.n_expert = text.whole("num_experts" if "num_experts" in text else "num_local_experts")
        self.n_ff_expert = text.whole("moe_intermediate_size")
        text.only("norm_topk_prob", True)
        text.get("norm_topk_prob")  # false where it is absent
        text.only("decoder_sparse_step", 1)
        text.only("mlp_only_layers", [])

    def keys(self) -> dict[str, Any]:
        return super().keys() | {
            "expert_count": self.n_expert,
            "expert_used_count": self.config.whole("num_experts_per_tok"),
            "expert_feed_forward_length": self.n_ff_expert,
        }

    def mlp(self) -> Items:
        yield "mlp.gate.weight", "ffn_gate_inp.weight", (self.n_expert, self.n_embd)

    def layer(self, i: int) -> Iterator[Tensor]:
        yield from super().layer(i)
        experts, wide, narrow = f"{self.root}layers.{i}.mlp.experts.", self.n_ff_expert, self.n_embd
        fused = f"{experts}gate_up_proj" in self.checkpoint
        for k, (source, shape) in enumerate(
            {"gate": (wide, narrow), "up": (wide, narrow), "down": (narrow, wide)}.items()
        ):
            name = f"blk.{i}.ffn_{source}_exps.weight"
            if not fused:
                yield self._stacked([f"{experts}{e}.{source}_proj.weight" for e in range(self.n_expert)], name, shape)
            elif source == "down":
                yield self.tensor(f"{experts}down_proj", name, (self.n_expert, *shape))
            else:
                yield self._half(f"{experts}gate_up_proj", name, shape, k)

    def _stacked(self, sources: list[str], name: str, shape: Shape) -> Tensor:
        """One matrix an expert."""
        for source in sources:
            self.expect(source, shape)
        return Tensor(name, (len(sources), *shape), lambda: (self.checkpoint.tensor(source) for source in sources))

    def _half(self, source: str, name: str, shape: Shape, k: int) -> Tensor:
        """The `k`-th half of the rows of each expert."""
        self.expect(source, (self.n_expert, 2 * shape[0], shape[1]))
        rows = slice(k * shape[0], (k + 1) * shape[0])
        experts = range(self.n_expert)
        return Tensor(
            name, (self.n_expert, *shape), lambda: (self.checkpoint.rows(source, e, e + 1)[0, rows] for e in experts)
        )


class Qwen35(Qwen3):
    """Qwen3_5ForCausalLM and the text part of Qwen3_5ForConditionalGeneration: three gated delta nets to one attention.

    Norms hold what is added to one. A key head serves several value heads: transformers keeps those of one key head
    together, ggml repeats the key heads as a whole (k0 k1 k0 k1 ...), so the value heads are put in that order.
    Layers for multi-token prediction (`mtp.*`) become blocks behind the others, as llama.cpp has them.
    """

    arch = "qwen35"
    ropes = ("default",)

    def __init__(self, checkpoint: Checkpoint, text: Config, root: str = "model.") -> None:
        super().__init__(checkpoint, text, root)
        self.n_key_heads, self.n_value_heads = (text.whole(f"linear_num_{kind}_heads") for kind in ("key", "value"))
        self.state_size = text.whole("linear_key_head_dim")
        self.n_taps = text.whole("linear_conv_kernel_dim")
        text.only("linear_value_head_dim", self.state_size)
        if not self.n_key_heads or self.n_value_heads % self.n_key_heads:
            raise ModelError(f"{text.name} has {self.n_value_heads} value heads for {self.n_key_heads} key heads.")
        self.n_mtp = text.whole("mtp_num_hidden_layers", 0)
        if not any(name.startswith("mtp.") for name in checkpoint.names()):
            self.n_mtp = 0  # fine-tuning with transformers drops them, but not the key

    def _refuse(self) -> None:
        Family._refuse(self)
        self.config.only("attn_output_gate", True)
        self.config.only("output_gate_type", "swish", "silu")
        self.config.only("mtp_use_dedicated_embeddings", False)
        self.config.only("mlp_only_layers", [])
        self.rope.only("mrope_interleaved", True)
        interval = self.config.whole("full_attention_interval", 4) or 4
        usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(self.n_layer)]
        self.kinds = self._layer_types(usual, "linear_attention", "full_attention")

    def keys(self) -> dict[str, Any]:
        share = self.rope.real("partial_rotary_factor", self.config.real("partial_rotary_factor", 0.25))
        if not 0 < share <= 1:
            raise ModelError(f"{self.rope.name} has {share} as 'partial_rotary_factor'; it must be above 0, at most 1.")
        n_rot, sections = int(self.head_dim * share), self.rope.get("mrope_section", [11, 11, 10])
        whole = isinstance(sections, list) and all(type(n) is int and n >= 0 for n in sections)
        if not whole or len(sections) > 4 or 2 * sum(sections) != n_rot:
            raise ModelError(
                f"{self.rope.name} has {sections!r} as 'mrope_section' for {n_rot // 2} pairs of dimensions."
            )
        n_nextn = {"nextn_predict_layers": self.n_mtp} if self.n_mtp else {}
        recurrent = [kind == "linear_attention" for kind in self.kinds] + [False] * self.n_mtp
        return (
            super().keys()
            | n_nextn
            | {
                "block_count": self.n_layer + self.n_mtp,
                "rope.dimension_count": n_rot,
                "rope.dimension_sections": [*sections, 0, 0, 0, 0][:4],
                "full_attention_interval": self.config.whole("full_attention_interval", 4),
                "attention.recurrent_layers": recurrent,
                "ssm.conv_kernel": self.n_taps,
                "ssm.state_size": self.state_size,
                "ssm.group_count": self.n_key_heads,
                "ssm.time_step_rank": self.n_value_heads,
                "ssm.inner_size": self.n_value_heads * self.state_size,
            }
        )

    @staticmethod
    def norm(weight: Array) -> Array:
        return weight + 1

    def items(self, i: int) -> Items:
        yield "input_layernorm.weight", "attn_norm.weight", (self.n_embd,), self.norm
        yield from self.delta_net() if i < self.n_layer and self.kinds[i] == "linear_attention" else self.attention()
        yield "post_attention_layernorm.weight", "post_attention_norm.weight", (self.n_embd,), self.norm
        yield from self.mlp()

    def attention(self) -> Items:
        """The query projection holds a gate behind each head's query."""
        n_q = self.n_head * self.head_dim
        for source, name, shape, *_ in super().attention():
            if name == "attn_q.weight":
                yield source, name, (2 * n_q, self.n_embd)
            elif name.endswith("_norm.weight"):
                yield source, name, shape, self.norm
            else:
                yield source, name, shape

    def delta_net(self) -> Items:
        n_key, n_value = self.n_key_heads * self.state_size, self.n_value_heads * self.state_size
        n_qkv, n_embd, heads = 2 * n_key + n_value, self.n_embd, self.n_value_heads

        def values(weight: Array) -> Array:
            """The rows of the value heads behind those of queries and keys."""
            return np.concatenate((weight[: 2 * n_key], self._tiled(weight[2 * n_key :])))

        yield "linear_attn.in_proj_qkv.weight", "attn_qkv.weight", (n_qkv, n_embd), values
        yield "linear_attn.in_proj_z.weight", "attn_gate.weight", (n_value, n_embd), self._tiled
        yield "linear_attn.conv1d.weight", "ssm_conv1d.weight", (n_qkv, 1, self.n_taps), lambda w: values(w[:, 0])
        yield "linear_attn.dt_bias", "ssm_dt.bias", (heads,), self._tiled
        yield "linear_attn.A_log", "ssm_a", (heads,), lambda w: -np.exp(self._tiled(w))
        yield "linear_attn.in_proj_b.weight", "ssm_beta.weight", (heads, n_embd), self._tiled
        yield "linear_attn.in_proj_a.weight", "ssm_alpha.weight", (heads, n_embd), self._tiled
        yield "linear_attn.norm.weight", "ssm_norm.weight", (self.state_size,)
        yield "linear_attn.out_proj.weight", "ssm_out.weight", (n_embd, n_value), lambda w: self._tiled(w.T).T

    def _tiled(self, rows: Array) -> Array:
        """Value heads from the order of their key heads to k0 k1 k0 k1 ...; a head may take one row or many."""
        groups = rows.reshape(self.n_key_heads, self.n_value_heads // self.n_key_heads, -1)
        return groups.swapaxes(0, 1).reshape(rows.shape)

    def tensors(self) -> list[Tensor]:
        for name in self.checkpoint.names():
            if name.startswith("model.visual."):
                self.checkpoint.taken.add(name)  # for llama.cpp those are another file
        return [*super().tensors(), *(t for k in range(self.n_mtp) for t in self._mtp(k))]

    def _mtp(self, k: int) -> Iterator[Tensor]:
        i, norm = self.n_layer + k, ((self.n_embd,), self.norm)
        for source, name, *rest in self.items(i):
            yield self.tensor(f"mtp.layers.{k}.{source}", f"blk.{i}.{name}", *rest)
        if k == 0:
            yield self.tensor("mtp.fc.weight", f"blk.{i}.nextn.eh_proj.weight", (self.n_embd, 2 * self.n_embd))
            yield self.tensor("mtp.pre_fc_norm_embedding.weight", f"blk.{i}.nextn.enorm.weight", *norm)
            yield self.tensor("mtp.pre_fc_norm_hidden.weight", f"blk.{i}.nextn.hnorm.weight", *norm)
            yield self.tensor("mtp.norm.weight", f"blk.{i}.nextn.shared_head_norm.weight", *norm)


FAMILIES: dict[str, type[Family]] = {
    "LlamaForCausalLM": Llama,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35,
}


def family_of(checkpoint: Checkpoint, architecture: str) -> Family:
    """The model of a checkpoint, whose architecture is one of FAMILIES."""
    config = checkpoint.config
    if architecture != "Qwen3_5ForConditionalGeneration":
        return FAMILIES[architecture](checkpoint, config)
    return FAMILIES[architecture](checkpoint, config.section("text_config"), "model.language_model.")
