"""Drafters from checkpoints: llama.cpp's pool against the torch forward, llama.cpp's own converter, and bad input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from drafter_checkpoints import EXPECTED, FORMS, MASK, contents, write_checkpoint
from safetensors.torch import load_file, save_file
from test_distill_model import SHAPE, exact_memory, inputs, random_drafter  # noqa: F401
from test_distill_model import _compare as worst_difference
from torch import Tensor, nn

from localspec.convert.checkpoint import origin
from localspec.convert.drafter import convert
from localspec.convert.drafter_target import open_target
from localspec.dflash.compat import check_drafter, check_pair
from localspec.distill.export import export
from localspec.distill.hf import write_hf
from localspec.distill.model import BlockConv, Drafter, Geometry, Layer
from localspec.distill.start import TargetFile
from localspec.engine import drafter as engine
from localspec.engine.lattice import Lattice
from localspec.engine.target import Target
from localspec.errors import LocalspecError, MissingError, ModelError, OptionError, PairError
from localspec.llama import Model, quantize, read_header, read_typed

Tensors = dict[str, Tensor]
ANCHOR = 33


def edit(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    dflash: Mapping[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] = dict,
) -> Path:
    """Change a checkpoint; a value of None takes a key away."""
    path = folder / "config.json"
    found = json.loads(path.read_text())
    for values, changes in ((found, config), (found["dflash_config"], dflash)):
        values |= changes or {}
        for key in [key for key, value in (changes or {}).items() if value is None]:
            del values[key]
    path.write_text(json.dumps(found))
    weights = tensors(load_file(folder / "model.safetensors"))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def without(*prefixes: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if not name.startswith(prefixes)}


def target_file(folder: Path, arch: str = "llama") -> Path:
    return tiny.write_target(folder / "target.gguf", arch)


def whole_head(target: Path, **changes: Any) -> Drafter:
    """A random drafter with the target's own embeddings and head."""
    file = TargetFile(target)
    shape = dataclasses.replace(SHAPE, n_rows=SHAPE.n_vocab, **changes)
    drafter = random_drafter(shape, file.tensor("token_embd.weight"))
    head = file.tensor("output.weight")
    assert head is not None
    with torch.no_grad():
        drafter.head.weight.copy_(head)
    return drafter


def torch_pool(drafter: Drafter, scale: float = 1.0) -> tuple[Lattice, Tensor, Tensor]:
    """The pool of one block, the features [S, n_features] it was made from and the anchor token."""
    features, anchors, tokens = inputs(anchors=(ANCHOR,))
    features = features[:, :ANCHOR]
    with torch.no_grad():
        hidden = drafter(features, anchors, scale * drafter.embed_block(tokens))
        ids, scores = drafter.lattice(hidden, tokens)
    return Lattice(ids[0, 0].int().numpy(), scores[0, 0].numpy()), features[0], tokens


def llama_pool(target_path: Path, path: Path, features: Tensor, token: Tensor, block_size: int = 8) -> Lattice:
    with Model(target_path) as target_model, Model(path) as drafter_model:
        target = Target(target_model, layers=list(SHAPE.target_layers), n_ctx=64)
        theirs = engine.Drafter(drafter_model, target, block_size=block_size, causal=False)
        theirs.inject(features.numpy())
        pool = theirs.draft(int(token), block_size - 1)
        theirs.close()
        target.close()
    return pool


class Transformed(nn.Module):
    """A head whose logits are scaled and capped."""

    def __init__(self, head: nn.Module, multiplier: float, cap: float) -> None:
        super().__init__()
        self.head, self.multiplier, self.cap = head, multiplier, cap

    def forward(self, hidden: Tensor) -> Tensor:
        return self.cap * torch.tanh(self.head(hidden) * self.multiplier / self.cap)


def check_pool(folder: Path, target: Path, drafter: Drafter, scale: float = 1.0) -> None:
    out = folder.with_suffix(".gguf")
    convert(folder, out, target=target, outtype="f32")
    ours, features, token = torch_pool(drafter, scale)
    theirs = llama_pool(target, out, features, token, drafter.config.block_size)
    assert worst_difference(ours.ids, ours.scores, theirs.ids, theirs.scores) < 1e-4


@pytest.mark.usefixtures("exact_memory")
class TestDFlash2:
    """llama.cpp's pool is that of the torch module whose checkpoint was converted."""

    @pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen35"])
    def test_borrowing_embeddings_and_head(self, tmp_path: Path, arch: str) -> None:
        drafter = whole_head(target := target_file(tmp_path, arch))
        write_hf(drafter, tmp_path / "hf", target_name="tiny", n_target_layers=4)
        check_pool(edit(tmp_path / "hf", tensors=without("lm_head")), target, drafter)

    @pytest.mark.parametrize(
        "changes",
        [
            {"sliding_window": 24},
            {"conv_taps": 3, "conv_group": 32},
            {"block_size": 5, "selector_rank": 16, "top_k": 8},
        ],
    )
    def test_a_reduced_head(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        embeddings = TargetFile(target := target_file(tmp_path)).tensor("token_embd.weight")
        drafter = random_drafter(dataclasses.replace(SHAPE, **changes), embeddings)
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        check_pool(tmp_path / "hf", target, drafter)

    @pytest.mark.parametrize("head", ["its own", "its embeddings", "the target's"])
    def test_its_own_embeddings(self, tmp_path: Path, head: str) -> None:
        target = target_file(tmp_path)
        drafter = whole_head(target)
        drafter.embeddings = torch.randn_like(drafter.embeddings)
        if head != "the target's":
            own = drafter.embeddings if head == "its embeddings" else torch.randn_like(drafter.embeddings)
            drafter.head.weight = nn.Parameter(0.1 * own)
            drafter.embeddings = 0.1 * drafter.embeddings
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        if head != "its own":
            edit(tmp_path / "hf", tensors=without("lm_head"), config={"tie_word_embeddings": head == "its embeddings"})
        edit(tmp_path / "hf", tensors=lambda tensors: tensors | {"embed_tokens.weight": drafter.embeddings})
        check_pool(tmp_path / "hf", target, drafter)

    def test_a_window_in_some_layers_only(self, tmp_path: Path) -> None:
        drafter = whole_head(target := target_file(tmp_path), sliding_window=16)
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        kinds = {"layer_types": ["sliding_attention", "full_attention"]}
        edit(tmp_path / "hf", tensors=without("lm_head"), config=kinds)
        everything = Geometry(
            dataclasses.replace(drafter.config, sliding_window=None), ANCHOR, torch.tensor([[ANCHOR]])
        )
        layer = drafter.layers[1]
        assert isinstance(layer, Layer)
        forward = layer.forward
        layer.forward = lambda h, context, _: forward(h, context, everything)  # type: ignore[method-assign]
        check_pool(tmp_path / "hf", target, drafter)

    def test_logits_scaled_and_capped_embeddings_scaled(self, tmp_path: Path) -> None:
        drafter = whole_head(target := target_file(tmp_path))
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        scales = {"output_multiplier": 0.3, "final_logit_softcapping": 4.0, "input_embedding_scale": 1.7}
        edit(tmp_path / "hf", tensors=without("lm_head"), dflash=scales)
        drafter.head = Transformed(drafter.head, 0.3, 4.0)  # type: ignore[assignment]
        check_pool(tmp_path / "hf", target, drafter, scale=1.7)

    def test_bfloat16_in_shards(self, tmp_path: Path) -> None:
        drafter = whole_head(target := target_file(tmp_path))
        with torch.no_grad():
            drafter.feature_scale.fill_(1.0)  # it is folded into a weight, which would be rounded as a whole
            for parameter in drafter.parameters():
                parameter.copy_(parameter.bfloat16().float())
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        edit(tmp_path / "hf", tensors=without("lm_head"))
        shard(tmp_path / "hf")
        head = TargetFile(target).tensor("output.weight")
        assert head is not None
        with torch.no_grad():
            drafter.head.weight.copy_(head)
        check_pool(tmp_path / "hf", target, drafter)


def shard(folder: Path) -> None:
    """Turn a checkpoint into two files of bfloat16."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: t.bfloat16() for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.usefixtures("exact_memory")
class TestDFlash1:
    """The same without convolutions and selector: the best tokens of each slot by their logits."""

    def write(self, drafter: Drafter, folder: Path) -> Path:
        for layer in drafter.layers:
            layer.attn_conv = layer.ffn_conv = BlockConv(drafter.config)  # the identity
        write_hf(drafter, folder, target_name="tiny")
        nested = ("block_size", "conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k")
        flat = {"architectures": ["DFlashDraftModel"], "block_size": drafter.config.block_size, "is_causal": None}
        rope = {"rope_theta": drafter.config.rope_theta, "rope_parameters": None}
        edit(folder, config=flat | rope, dflash=dict.fromkeys(nested))
        return edit(
            folder,
            tensors=lambda tensors: {
                name: t for name, t in tensors.items() if "conv" not in name and "selector" not in name
            },
        )

    def check(self, folder: Path, target: Path, drafter: Drafter) -> None:
        convert(folder, folder.with_suffix(".gguf"), target=target, outtype="f32")
        features, anchors, tokens = inputs(anchors=(ANCHOR,))
        with torch.no_grad():
            hidden = drafter(features[:, :ANCHOR], anchors, drafter.embed_block(tokens))
            logits, rows = drafter.head(hidden)[0, 0].topk(engine.POOL)
        theirs = llama_pool(target, folder.with_suffix(".gguf"), features[0, :ANCHOR], tokens)
        scores = logits[:, None, :].expand(-1, engine.POOL, -1)
        assert worst_difference(drafter.kept[rows].numpy(), scores.numpy(), theirs.ids, theirs.scores) < 1e-4

    @pytest.mark.parametrize("arch", ["llama", "qwen35"])
    def test_borrowing_embeddings_and_head(self, tmp_path: Path, arch: str) -> None:
        drafter = whole_head(target := target_file(tmp_path, arch))
        self.write(drafter, tmp_path / "hf")
        self.check(edit(tmp_path / "hf", tensors=without("lm_head")), target, drafter)

    def test_a_reduced_head(self, tmp_path: Path) -> None:
        drafter = random_drafter(embeddings=TargetFile(target := target_file(tmp_path)).tensor("token_embd.weight"))
        self.check(self.write(drafter, tmp_path / "hf"), target, drafter)

    def test_an_embedding_for_its_mask(self, tmp_path: Path) -> None:
        drafter = whole_head(target := target_file(tmp_path))
        self.write(drafter, tmp_path / "hf")
        edit(tmp_path / "hf", tensors=without("lm_head"))
        embedding = torch.randn(SHAPE.n_embd, generator=torch.Generator().manual_seed(3))
        torch.save({"mask_token_id": MASK, "embedding": embedding}, tmp_path / "hf" / "mask_embedding.pt")
        drafter.embeddings[MASK] = embedding
        self.check(tmp_path / "hf", target, drafter)


# --- against llama.cpp's own converter

# What we add: whose drafter it is.
OURS = {"localspec.version", "localspec.target_name", "localspec.tokenizer_sha256"}


@pytest.mark.parametrize("name", FORMS)
def test_the_file_is_the_one_llama_cpp_makes(tmp_path: Path, name: str) -> None:
    form, expected = FORMS[name], json.loads(EXPECTED.read_text())[name]
    folder = write_checkpoint(tmp_path / "drafter", form)
    convert(folder, out := tmp_path / "out.gguf", target=target_file(tmp_path, form.target), outtype=form.outtype)
    ours = json.loads(json.dumps(contents(out)))
    assert ours["tensors"] == expected["tensors"]
    assert {key: value for key, value in ours["keys"].items() if key not in OURS} == expected["keys"]
    assert ours["keys"].keys() >= OURS


def test_what_write_hf_writes_comes_back_as_what_export_writes(tmp_path: Path) -> None:
    target = target_file(tmp_path)
    drafter = random_drafter(dataclasses.replace(SHAPE, sliding_window=24))
    export(drafter, target, tmp_path / "export.gguf", encoding="f32")
    write_hf(drafter, tmp_path / "hf", target_name="someone/tiny", n_ctx_train=4096)
    convert(tmp_path / "hf", tmp_path / "out.gguf", target=target, outtype="f32")
    ours, theirs = contents(tmp_path / "out.gguf"), contents(tmp_path / "export.gguf")
    assert ours["tensors"] == theirs["tensors"]
    assert ours["keys"].pop("localspec.target_name")[1] == "someone/tiny"
    differing = {key for key in theirs["keys"] if theirs["keys"][key] != ours["keys"].get(key)}
    assert differing == {"general.name", "dflash.rope.dimension_count"}  # the latter gives the default


@pytest.mark.parametrize("outtype", ["q4_k_m", "q4_0"])
def test_a_quantised_drafter_drafts(tmp_path: Path, outtype: str) -> None:
    target, drafter = target_file(tmp_path), random_drafter()
    write_hf(drafter, tmp_path / "hf", target_name="tiny")
    convert(tmp_path / "hf", out := tmp_path / "out.gguf", target=target, outtype=outtype)
    check_drafter(header := read_header(out))
    check_pair(read_header(target), header)
    _, features, token = torch_pool(drafter)
    assert set(llama_pool(target, out, features, token).ids.flat) <= set(drafter.kept.tolist())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out.gguf", "target.gguf"]


# --- whose drafter it is


def cached(tmp_path: Path, repository: str, revision: str) -> Path:
    folder = tmp_path / f"models--{repository.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder


def test_the_file_says_whose_drafter_it_is(tmp_path: Path) -> None:
    target = tiny.write_target(cached(tmp_path, "a/b-GGUF", "f00") / "b.gguf")
    folder = cached(tmp_path, "z-lab/b-DFlash2", "beef")
    folder.rmdir()
    edit(write_checkpoint(folder, FORMS["muse-dflash2"]), dflash={"thinking": True})
    convert(folder, out := tmp_path / "out.gguf", target=target)
    header = read_header(out)
    said = {key.partition(".")[2]: value for key, value in header.values.items() if key.startswith("localspec.")}
    assert said.pop("version")
    assert said == {
        "source_repo": "z-lab/b-DFlash2",
        "source_revision": "beef",
        "target_name": "tiny llama",
        "target_repo": "a/b-GGUF",
        "target_revision": "f00",
        "tokenizer_sha256": read_header(target).strings["tokenizer.ggml.tokens"][1],
        "thinking": "on",
    }
    assert header.get("general.name") == "b-DFlash2"
    assert header.strings == read_header(target).strings


def test_the_vocabulary_is_copied_to_the_byte(tmp_path: Path) -> None:
    folder, target = write_checkpoint(tmp_path / "hf", FORMS["muse-dflash2"]), target_file(tmp_path)
    convert(folder, out := tmp_path / "out.gguf", target=target)
    assert set(copied(out)) == set(copied(target)) | {("tokenizer.ggml.mask_token_id", 4, None, str(MASK))}


def copied(path: Path) -> list[tuple[str, int, int | None, str]]:
    return [(*key, str(value)) for *key, value in read_typed(path, "tokenizer.")]


def write_tokenizer(folder: Path) -> None:
    """The tiny target's vocabulary as tokenizer.json and tokenizer_config.json."""
    tokens, types = tiny._vocabulary(SHAPE.n_vocab)
    n_plain = types.count(1)
    added = [{"id": i, "content": tokens[i], "special": True} for i in range(n_plain, len(tokens))]
    steps = [{"type": "Digits", "individual_digits": True}]
    steps += [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]
    tokenizer = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens[:n_plain])}, "merges": list(tiny.MERGES)},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": tiny.CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_checkpoint_serves_as_target_too(tmp_path: Path, arch: str) -> None:
    target = target_file(tmp_path, arch)
    sizes = {"hidden_size": 288, "vocab_size": 320, "num_hidden_layers": 4}
    rope = {"model_type": "qwen3_5_text", "rope_parameters": {"mrope_section": [3, 3, 2]}}
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": sizes | rope}
    config = nested if arch == "qwen35" else sizes | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder := tmp_path / "target").mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    drafter = write_checkpoint(tmp_path / "drafter", FORMS["muse-dflash2"])
    outs = tmp_path / "by_gguf.gguf", tmp_path / "by_folder.gguf"
    for out, given in zip(outs, (target, folder), strict=True):
        convert(drafter, out, target=given)
    by_gguf, by_folder = (contents(out) for out in outs)
    assert by_gguf["tensors"] == by_folder["tensors"]
    assert by_folder["keys"].pop("localspec.target_name") == ["STRING", "target"]
    assert {k: v for k, v in by_gguf["keys"].items() if k != "localspec.target_name"} == by_folder["keys"]
    texts = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"}
    ours, theirs = ({row for row in copied(out) if row[0] in texts} for out in outs)
    assert ours == theirs


def test_a_quantised_target_lends_its_tensors(tmp_path: Path) -> None:
    quantize(target_file(tmp_path), path := tmp_path / "q8_0.gguf", "q8_0")
    source, file = open_target(path), TargetFile(path)
    for name in ("token_embd.weight", "output.weight"):
        lent, expected = np.concatenate([*source.matrix(name).parts()]), file.tensor(name)
        assert expected is not None
        assert np.array_equal(lent, expected.numpy())
        assert np.array_equal(source.matrix(name).rows(7, 9), expected[7:9].numpy())


def test_a_target_whose_vocabulary_is_unknown_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", FORMS["muse-dflash2"])
    (folder := tmp_path / "target").mkdir()
    (folder / "config.json").write_text(
        json.dumps({"hidden_size": 288, "vocab_size": 320, "num_hidden_layers": 4, "architectures": ["Gemma4"]})
    )
    refusal(tmp_path, MissingError, "no tokenizer.json", target=folder)
    write_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    refusal(tmp_path, ModelError, "Unigram.*the target's GGUF", target=folder)


def test_only_the_cache_has_repositories(tmp_path: Path) -> None:
    assert origin(tmp_path / "models--a--b" / "snapshots" / "f00") == ("a/b", "f00")
    assert origin(tmp_path / "snapshots" / "f00") is None
    assert origin(tmp_path) is None


def test_gemma_scales_its_embeddings(tmp_path: Path) -> None:
    config = {"text_config": {"model_type": "gemma4_text", "hidden_size": 256, "vocab_size": 8, "num_hidden_layers": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_target(tmp_path).multiplier == 16.0


# --- bad input


def damaged_d2t(tensors: Tensors) -> Tensors:
    return tensors | {"d2t": torch.zeros_like(tensors["d2t"]) - torch.arange(len(tensors["d2t"]))}


WRONG: dict[str, tuple[dict[str, Any], type[LocalspecError], str]] = {
    "unknown key": ({"config": {"rope_local": 1}}, ModelError, "'rope_local'"),
    "unknown key inside": ({"dflash": {"gate": "x"}}, ModelError, "dflash_config.gate"),
    "unknown key of the rotation": ({"config": {"rope_parameters": {"rope_theta": 1.0, "low": 2}}}, ModelError, "low"),
    "no width": ({"config": {"hidden_size": None}}, ModelError, "'hidden_size'"),
    "no mask": ({"dflash": {"mask_token_id": None}}, ModelError, "'mask_token_id'"),
    "no block size": ({"dflash": {"block_size": None}}, ModelError, "'block_size'"),
    "no selector": ({"dflash": {"selector_rank": None}}, ModelError, "'selector_rank'"),
    "no theta": ({"config": {"rope_parameters": {"rope_type": "default"}}}, ModelError, "'rope_theta'"),
    "text as a number": ({"config": {"head_dim": "32"}}, ModelError, "'32'"),
    "no list of layers": ({"dflash": {"target_layer_ids": 3}}, ModelError, "target_layer_ids"),
    "a layer twice": ({"dflash": {"target_layer_ids": [1, 1]}}, ModelError, r"\[1, 1\]"),
    "mask beyond the vocabulary": ({"dflash": {"mask_token_id": 320}}, ModelError, "320"),
    "layers without end": ({"config": {"num_hidden_layers": 2**30}}, ModelError, "1 to 512"),
    "types that are none": ({"config": {"layer_types": [[], {}]}}, ModelError, "layer_types"),
    "thoughts": ({"dflash": {"thinking": ["a"]}}, ModelError, "thinking"),
    "half a pair rotated": ({"config": {"partial_rotary_factor": 0.1}}, ModelError, "3 of 32"),
    "block of one": ({"dflash": {"block_size": 1}}, ModelError, "block_size is 1"),
    "odd groups": ({"dflash": {"conv_group_size": 7}}, ModelError, "conv_group_size 7"),
    "pool too wide": ({"dflash": {"selector_top_k": 17}}, ModelError, "306"),
    "biases": ({"config": {"attention_bias": True}}, ModelError, "attention_bias"),
    "another activation": ({"config": {"hidden_act": "gelu"}}, ModelError, "'gelu'"),
    "another rotation": ({"config": {"rope_parameters": {"rope_theta": 1.0, "rope_type": "su"}}}, ModelError, "'su'"),
    "drafts from its anchor": ({"dflash": {"sample_from_anchor": True}}, ModelError, "sample_from_anchor"),
    "causal in words": ({"config": {"is_causal": "no"}}, ModelError, "'no'"),
    "types of three layers": ({"config": {"layer_types": ["full_attention"] * 3}}, ModelError, "layer_types"),
    "window switched off": ({"config": {"layer_types": ["sliding_attention"] * 2}}, ModelError, "use_sliding_window"),
    "sinks announced": ({"dflash": {"attention_sink_bias": True}}, ModelError, "attention_sink_bias"),
    "no window": (
        {"config": {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}},
        ModelError,
        "sliding_window",
    ),
    "another model": (
        {"config": {"architectures": ["LlamaForCausalLM"]}},
        ModelError,
        "LlamaForCausalLM.*convert_hf_to_gguf",
    ),
    "no architecture": ({"config": {"architectures": None}}, ModelError, "without architecture"),
    "unknown tensor": ({"tensors": lambda t: t | {"bias": torch.ones(2)}}, ModelError, "'bias'"),
    "no tensor": ({"tensors": without("layers.1.mlp.up")}, ModelError, "layers.1.mlp.up_proj.weight"),
    "a shape": ({"tensors": lambda t: t | {"norm.weight": torch.ones(2)}}, ModelError, r"\[2\].*\[288\]"),
    "DFlash 2 as 1": ({"config": {"architectures": ["DFlashDraftModel"]}}, ModelError, "_conv|candidate_selector"),
    "d2t damaged": ({"tensors": damaged_d2t}, ModelError, "120 different ones of 320"),
    "d2t alone": ({"tensors": without("lm_head")}, ModelError, "'lm_head.weight'"),
    "d2t missing": ({"tensors": without("d2t")}, ModelError, "120 of 320"),
    "for a deeper target": ({"config": {"num_target_layers": 9}}, PairError, "9 layers.*has 4"),
    "a layer too deep": ({"dflash": {"target_layer_ids": [1, 3]}}, PairError, "layer 3.*layers 0 to 2"),
}


def one_sentence(error: LocalspecError) -> str:
    text = str(error)
    assert text.endswith(".")
    assert "\n" not in text
    return text


def refusal(folder: Path, kind: type[LocalspecError], match: str, **options: Any) -> None:
    """The conversion fails with one sentence and leaves nothing behind."""
    before = sorted(folder.rglob("*"))
    options = {"folder": folder / "hf", "out": folder / "out.gguf", "target": folder / "target.gguf"} | options
    with pytest.raises(kind, match=match) as caught:
        convert(**options)
    one_sentence(caught.value)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named(tmp_path: Path, what: str) -> None:
    target_file(tmp_path)
    write_hf(random_drafter(), tmp_path / "hf", target_name="tiny", n_target_layers=4)
    changes, kind, match = WRONG[what]
    edit(tmp_path / "hf", **changes)
    refusal(tmp_path, kind, match)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_embd": 320}, "width 288.*width 320"),
        ({"n_vocab": 400}, "320 tokens.*has 400"),
        ({"n_layer": 6}, "4 layers.*has 6"),
    ],
)
def test_another_target_is_refused_with_both_sides(tmp_path: Path, options: dict[str, int], match: str) -> None:
    tiny.write_target(tmp_path / "target.gguf", **options)
    write_hf(random_drafter(), tmp_path / "hf", target_name="tiny", n_target_layers=4)
    refusal(tmp_path, PairError, match)


def test_a_target_that_is_none_is_refused(tmp_path: Path) -> None:
    write_hf(random_drafter(), tmp_path / "hf", target_name="tiny")
    refusal(tmp_path, ModelError, "cannot read")
    refusal(tmp_path, ModelError, "no config.json", target=tmp_path)
    tiny.write_drafter(tmp_path / "drafter.gguf", target_file(tmp_path))
    refusal(tmp_path, ModelError, "is a drafter", target=tmp_path / "drafter.gguf")
    tiny.truncate(tmp_path / "target.gguf", 100_000)
    refusal(tmp_path, ModelError, "cut off")


def test_a_file_in_the_way_stays(tmp_path: Path) -> None:
    target, out = target_file(tmp_path), tmp_path / "out.gguf"
    write_hf(random_drafter(), tmp_path / "hf", target_name="tiny")
    out.write_text("mine")
    refusal(tmp_path, OptionError, "--force")
    assert out.read_text() == "mine"
    convert(tmp_path / "hf", out, target=target, force=True)
    assert read_header(out).arch == "dflash"


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_runs_its_code(tmp_path: Path) -> None:
    target_file(tmp_path)
    write_hf(random_drafter(), tmp_path / "hf", target_name="tiny")
    torch.save({"mask_token_id": MASK, "embedding": Evil(tmp_path / "evil")}, tmp_path / "hf" / "mask_embedding.pt")
    refusal(tmp_path, ModelError, "mask_embedding.pt is damaged or holds more")
    (tmp_path / "hf" / "mask_embedding.pt").write_bytes(b"")
    refusal(tmp_path, ModelError, "mask_embedding.pt is damaged")
    torch.save({"mask_token_id": 7, "embedding": torch.ones(5)}, tmp_path / "hf" / "mask_embedding.pt")
    refusal(tmp_path, ModelError, "5 numbers for token 7.*288")


def test_write_hf_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(OptionError, match="exists"):
        write_hf(random_drafter(), tmp_path / "hf", target_name="tiny")
    assert not list((tmp_path / "hf").iterdir())
