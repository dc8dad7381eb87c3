"""The memory plan: arithmetic on made-up headers and pools, and held against what llama.cpp itself logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from click.testing import CliRunner, Result

from localspec import machine as this_machine
from localspec.cli.main import main
from localspec.engine import checkpoints, drafter, target
from localspec.errors import ModelError, OptionError
from localspec.hub import registry
from localspec.llama import Context, Header, Model, TensorInfo, read_header, set_verbose, with_shards
from localspec.llama.binding import C
from localspec.loading import memory_plan
from localspec.loading.memory_plan import place, plan, settle
from localspec.loading.open import open_pair
from localspec.machine import Pool

MIB, GIB = 2**20, 2**30
Shapes = dict[str, tuple[int, ...]]
LLAMA_8B = {"n_embd": 4096, "n_layer": 32, "n_ff": 14336, "n_head": 32, "n_kv": 8, "head": 128, "n_vocab": 128256}
QWEN3_32B = {"n_embd": 5120, "n_layer": 64, "n_ff": 25600, "n_head": 64, "n_kv": 8, "head": 128, "n_vocab": 151936}


# --- made-up models of real sizes


def dense(arch: str, n_embd: int, n_layer: int, n_ff: int, n_head: int, n_kv: int, head: int, n_vocab: int) -> Any:
    """Keys and tensor shapes of a llama or qwen3."""
    keys: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.context_length": 131072,
        f"{arch}.vocab_size": n_vocab,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layer,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_head,
        f"{arch}.attention.head_count_kv": n_kv,
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.value_length": head,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": head,
    }
    shapes: Shapes = {"token_embd.weight": (n_embd, n_vocab), "output_norm.weight": (n_embd,)}
    shapes["output.weight"] = (n_embd, n_vocab)
    for i in range(n_layer):
        shapes |= numbered(i, attention(n_embd, n_head, n_kv, head, norms=arch != "llama"))
        shapes |= numbered(i, {"ffn_norm.weight": (n_embd,), "ffn_down.weight": (n_ff, n_embd)})
        shapes |= numbered(i, {f"ffn_{name}.weight": (n_embd, n_ff) for name in ("gate", "up")})
    return keys, shapes


def experts(n_expert: int = 128, used: int = 8, n_own: int = 768, **sizes: int) -> Any:
    """A qwen3moe."""
    keys, shapes = dense("qwen3moe", **sizes)
    keys |= {"qwen3moe.expert_count": n_expert, "qwen3moe.expert_used_count": used}
    keys |= {"qwen3moe.expert_feed_forward_length": n_own}
    shapes = {name: shape for name, shape in shapes.items() if ".ffn_" not in name or "norm" in name}
    n_embd = sizes["n_embd"]
    for i in range(sizes["n_layer"]):
        shapes |= numbered(i, {"ffn_gate_inp.weight": (n_embd, n_expert)})
        shapes |= numbered(i, {f"ffn_{name}_exps.weight": (n_embd, n_own, n_expert) for name in ("gate", "up")})
        shapes |= numbered(i, {"ffn_down_exps.weight": (n_own, n_embd, n_expert)})
    return keys, shapes


def hybrid(n_key: int = 16, n_value: int = 48, state: int = 128, **sizes: int) -> Any:
    """A qwen35: three gated delta nets, then one layer of gated attention, and so on."""
    arch, n_embd, head = "qwen35", sizes["n_embd"], sizes["head"]
    keys, shapes = dense(arch, **sizes)
    inner = n_value * state
    keys |= {f"{arch}.rope.dimension_count": head // 4, f"{arch}.rope.dimension_sections": [11, 11, 10, 0]}
    keys |= {f"{arch}.ssm.conv_kernel": 4, f"{arch}.ssm.state_size": state, f"{arch}.ssm.group_count": n_key}
    keys |= {f"{arch}.ssm.time_step_rank": n_value, f"{arch}.ssm.inner_size": inner}
    for i in range(sizes["n_layer"]):
        shapes[f"blk.{i}.post_attention_norm.weight"] = shapes.pop(f"blk.{i}.ffn_norm.weight")
        if (i + 1) % 4 == 0:
            shapes[f"blk.{i}.attn_q.weight"] = (n_embd, 2 * sizes["n_head"] * head)
            continue
        for name in [name for name in shapes if name.startswith(f"blk.{i}.attn_") and "attn_norm" not in name]:
            del shapes[name]
        mixed = inner + 2 * n_key * state
        shapes |= numbered(i, {"attn_qkv.weight": (n_embd, mixed), "attn_gate.weight": (n_embd, inner)})
        shapes |= numbered(i, {"ssm_conv1d.weight": (4, mixed), "ssm_norm.weight": (state,), "ssm_a": (n_value,)})
        shapes |= numbered(i, {"ssm_dt.bias": (n_value,), "ssm_out.weight": (inner, n_embd)})
        shapes |= numbered(i, {f"ssm_{name}.weight": (n_embd, n_value) for name in ("alpha", "beta")})
    return keys, shapes


def dflash(n_target_layers: int, block_size: int = 8, rank: int = 256, **sizes: int) -> Any:
    """A DFlash 2 drafter that borrows embeddings and head."""
    arch, n_embd, n_vocab = "dflash", sizes["n_embd"], sizes["n_vocab"]
    keys, shapes = dense(arch, **sizes)
    keys |= {f"{arch}.block_size": block_size, f"{arch}.target_layers": list(range(1, 1 + n_target_layers))}
    keys |= {f"{arch}.conv_kernel_size": 2, f"{arch}.conv_group_size": 16, "tokenizer.ggml.mask_token_id": 1}
    keys |= {f"{arch}.selector_rank": rank, f"{arch}.selector_top_k": 16}
    del shapes["token_embd.weight"], shapes["output.weight"]
    shapes |= {"fc.weight": (n_target_layers * n_embd, n_embd), "enc.output_norm.weight": (n_embd,)}
    shapes |= {f"selector_{name}.weight": (rank, n_vocab) for name in ("predecessor", "successor")}
    shapes["selector_hidden.weight"] = (n_embd, rank)
    for i in range(sizes["n_layer"]):
        shapes |= numbered(i, {f"{part}_conv_base": (n_embd, 2, 2) for part in ("attn", "ffn")})
        shapes |= numbered(i, {f"{part}_conv_proj.weight": (n_embd, 4 * n_embd // 16) for part in ("attn", "ffn")})
    return keys, shapes


def numbered(layer: int, shapes: Shapes) -> Shapes:
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def attention(n_embd: int, n_head: int, n_kv: int, head: int, *, norms: bool) -> Shapes:
    shapes: Shapes = {"attn_norm.weight": (n_embd,), "attn_q.weight": (n_embd, n_head * head)}
    shapes |= {f"attn_{name}.weight": (n_embd, n_kv * head) for name in ("k", "v")}
    shapes["attn_output.weight"] = (n_head * head, n_embd)
    return shapes | ({f"attn_{name}_norm.weight": (head,) for name in ("q", "k")} if norms else {})


def header(made: Any, **changes: Any) -> Header:
    """A header of q4_0 matrices (18 bytes for 32 weights) that no file stands behind; `None` drops a key."""
    keys, shapes = made
    arch = keys["general.architecture"]
    values = keys | {f"{arch}.{name.replace('__', '.')}": value for name, value in changes.items()}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None}
    tensors = {name: TensorInfo(2, shape, 0, memory_plan._count(shape) * 18 // 32) for name, shape in shapes.items()}
    return Header(Path("made-up.gguf"), 0, values, {}, tensors)


def sparse(path: Path, made: Any) -> Path:
    """The same as a file of f16 matrices, all holes: llama.cpp may look at its header, not at its weights."""
    keys, shapes = dict(made[0]), made[1]
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture"))
    for name, value in keys.items():
        writer.add_key_value(name, value, tiny._value_type(value))
    writer.add_tokenizer_model("none")
    for name, shape in shapes.items():
        kind: Any = np.float16 if len(shape) > 1 and "conv" not in name else np.float32
        n_bytes = memory_plan._count(shape) * np.dtype(kind).itemsize
        writer.add_tensor_info(name, shape[::-1], np.dtype(kind), n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    n_bytes = sum(-(-tensor.nbytes // 32) * 32 for tensor in writer.tensors[0].values())
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + n_bytes)
    return path


# --- weights


def test_weights_are_split_by_layer() -> None:
    made = dense("llama", **LLAMA_8B)
    head = header(made)
    part = memory_plan.target_part(head, 8192, 0, 0)
    layer = sum(t.n_bytes for name, t in head.tensors.items() if name.startswith("blk.7."))
    assert part.weights[:-1] == (layer,) * 32
    assert part.weights[-1] == head.tensors["output.weight"].n_bytes + head.tensors["output_norm.weight"].n_bytes
    assert part.embeddings == head.tensors["token_embd.weight"].n_bytes
    assert sum(part.weights) + part.embeddings == sum(t.n_bytes for t in head.tensors.values())
    assert part.tied == 0


def test_a_tied_head_costs_again_on_a_gpu_only() -> None:
    keys, shapes = dense("llama", **LLAMA_8B)
    del shapes["output.weight"]
    head = header((keys, shapes))
    pools = [Pool("RAM", GIB, GIB), Pool("CUDA0", GIB, GIB)]
    on_cpu, on_gpu = (plan(head, None, pools, n_ctx=4096, gpu_layers=n, draft_gpu_layers=0) for n in (0, 1))
    embeddings, norm = head.tensors["token_embd.weight"].n_bytes, head.tensors["output_norm.weight"].n_bytes
    assert on_cpu.needs(0, "weights") == sum(t.n_bytes for t in head.tensors.values())
    assert on_gpu.needs(0, "weights") == on_cpu.needs(0, "weights") - norm
    assert on_gpu.needs(1, "weights") == embeddings + norm


def test_layers_for_multi_token_prediction_are_not_loaded() -> None:
    head = header(dense("qwen3moe", **LLAMA_8B), nextn_predict_layers=2)
    part = memory_plan.target_part(head, 8192, 0, 0)
    assert part.weights[29] > 0 == part.weights[30] == part.weights[31]
    assert part.memory[29] > 0 == part.memory[30] == part.memory[31]


def test_a_split_model_is_weighed_as_a_whole(tmp_path: Path) -> None:
    keys, shapes = dense("llama", **(LLAMA_8B | {"n_embd": 64, "n_layer": 3, "n_ff": 64, "n_vocab": 64}))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=10)
    for name, value in list(keys.items())[1:]:
        writer.add_key_value(name, value, tiny._value_type(value))
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape[::-1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = read_header(tmp_path / "m-00001-of-00003.gguf")
    whole = with_shards(first)
    assert len(first.tensors) == 10
    assert set(whole.tensors) == set(shapes)
    part = memory_plan.target_part(whole, 512, 0, 0)
    assert sum(part.weights) + part.embeddings == 4 * sum(memory_plan._count(shape) for shape in shapes.values())
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match="m-00002-of-00003"):
        with_shards(first)
    assert with_shards(header((keys, shapes))).path.name == "made-up.gguf"


# --- caches and states


def kept(made: Any, n_ctx: int = 8192, draft_max: int = 0, **changes: Any) -> tuple[int, ...]:
    return memory_plan.target_part(header(made, **changes), n_ctx, draft_max, 0).memory[:-1]


def test_grouped_queries_keep_only_their_heads() -> None:
    assert kept(dense("llama", **LLAMA_8B)) == (8192 * 8 * 128 * 2 * 2,) * 32  # K and V, two bytes each
    assert sum(kept(dense("llama", **LLAMA_8B))) == GIB
    assert kept(dense("llama", **LLAMA_8B), n_ctx=8193) == (8448 * 8 * 128 * 2 * 2,) * 32  # whole cells of 256


def test_heads_may_differ_from_layer_to_layer() -> None:
    heads = [8, 4] * 16
    assert kept(dense("llama", **LLAMA_8B), attention__head_count_kv=heads) == tuple(8192 * n * 512 for n in heads)
    assert kept(dense("llama", **LLAMA_8B), attention__head_count_kv=None) == (8192 * 32 * 512,) * 32


def test_a_sliding_window_keeps_the_window_and_a_batch() -> None:
    full, window = 8192 * 8 * 512, (1024 + 512) * 8 * 512
    swa = {"attention__sliding_window": 1024}
    made = dense("gpt-oss", **LLAMA_8B)
    assert kept(made, **swa) == (window, full) * 16
    assert kept(made, **swa, attention__sliding_window_pattern=[True] * 31 + [False]) == (window,) * 31 + (full,)
    assert kept(made, n_ctx=512, **swa) == (512 * 8 * 512,) * 32  # never more than the context
    assert kept(dense("llama", **LLAMA_8B), **swa) == (full,) * 32  # llama.cpp does not read the key for llama
    sizes = {"attention__key_length_swa": 64, "attention__value_length_swa": 64}
    assert kept(made, **swa, **sizes) == (window // 2, full) * 16


def test_latent_attention_and_shared_layers() -> None:
    made = dense("deepseek2", **LLAMA_8B)
    sizes = {"attention__head_count_kv": 1, "attention__key_length": 576, "attention__value_length": 512}
    assert kept(made, **sizes, attention__key_length_mla=192) == (8192 * 576 * 2,) * 32
    shared = kept(dense("gemma4", **LLAMA_8B), attention__shared_kv_layers=20)
    assert [size > 0 for size in shared] == [True] * 12 + [False] * 20


def test_recurrent_layers_keep_a_state_for_each_token_that_may_be_taken_back() -> None:
    made = hybrid(**LLAMA_8B)
    state = 4 * (3 * (6144 + 2 * 16 * 128) + 6144 * 128)
    for draft_max in (0, 7):
        sizes = kept(made, draft_max=draft_max)
        assert sizes == ((1 + draft_max) * state,) * 3 + (8192 * 8 * 512,) + sizes[4:]
        assert sizes[:4] * 8 == sizes


def test_short_convolutions_are_recurrent_where_there_are_no_heads() -> None:
    made = dense("lfm2", **LLAMA_8B)
    sizes = kept(made, shortconv__l_cache=3, attention__head_count_kv=[0, 0, 8, 0] * 8)
    assert sizes == (4 * 2 * 4096, 4 * 2 * 4096, 8192 * 8 * 512, 4 * 2 * 4096) * 8


# --- which layer lies where


@pytest.mark.parametrize(
    ("n", "free", "where"),
    [
        (0, [8, 8], [0, 0, 0, 0, 0]),
        (1, [8], [0, 0, 0, 0, 1]),  # the head first
        (3, [8], [0, 0, 1, 1, 1]),
        (5, [8], [1, 1, 1, 1, 1]),
        (99, [8], [1, 1, 1, 1, 1]),
        (4, [8, 8], [0, 1, 1, 2, 2]),
        (5, [24, 8], [1, 1, 1, 1, 2]),  # 0, .2, .4, .6 | .8
        (5, [], [0, 0, 0, 0, 0]),
        (2, [0], [0, 0, 0, 1, 1]),
    ],
)
def test_layers_go_to_gpus_as_llama_cpp_splits_them(n: int, free: list[int], where: list[int]) -> None:
    assert place(4, n, free) == where


# --- choosing


def machine(ram: float, *gpus: float, free: float | None = None, swap: float = 0) -> list[Pool]:
    """Pools of so many GiB; GPUs are all free, RAM as far as `free` says."""
    whole = Pool("RAM", int(ram * GIB), int((ram if free is None else free) * GIB), int(swap * GIB))
    return [whole, *(Pool(f"CUDA{i}", int(n * GIB), int(n * GIB)) for i, n in enumerate(gpus))]


EIGHT = header(dense("llama", **LLAMA_8B))  # 4.2 GiB of weights, 1 GiB of cache for 8,192 tokens
SPEAKER = header(hybrid(**(QWEN3_32B | {"n_kv": 4})))
HELPER = header(dflash(5, **(QWEN3_32B | {"n_layer": 5, "n_ff": 17408, "n_head": 32})))


def test_the_context_is_8192_where_more_would_be_greedy() -> None:
    assert settle(EIGHT, None, machine(12)).n_ctx == 8192


def test_the_context_grows_while_it_is_cheap_up_to_the_training_length() -> None:
    grown = settle(EIGHT, None, machine(64))
    assert 8192 < grown.n_ctx < 131072
    weights = grown.needs(0, "weights")
    assert grown.needs(0) - weights <= (64 * GIB - weights) / 8
    assert settle(EIGHT, None, machine(400)).n_ctx == 131072
    assert settle(header(dense("llama", **LLAMA_8B), context_length=2048), None, machine(64)).n_ctx == 2048


def test_the_context_shrinks_where_memory_is_short() -> None:
    chosen = settle(EIGHT, None, machine(16, free=5.3))
    assert 2048 <= chosen.n_ctx < 8192
    assert chosen.is_comfortable()
    assert settle(EIGHT, None, machine(16, free=1)).n_ctx == 2048  # weights need not be free memory


def test_all_layers_go_to_a_card_that_holds_them() -> None:
    chosen = settle(EIGHT, None, machine(16, 12))
    assert chosen.gpu_layers == 33
    assert chosen.n_ctx == 8192
    assert chosen.needs(0, "weights") == EIGHT.tensors["token_embd.weight"].n_bytes


def test_as_many_layers_as_fit_go_to_a_smaller_card() -> None:
    chosen = settle(EIGHT, None, machine(16, 4))
    assert 10 < chosen.gpu_layers < 33
    assert chosen.has_room(1)
    again = plan(EIGHT, None, machine(16, 4), n_ctx=8192, gpu_layers=chosen.gpu_layers + 1, draft_gpu_layers=0)
    assert not again.has_room(1)
    assert settle(EIGHT, None, machine(16, 0.7)).gpu_layers == 0


def test_a_card_that_holds_a_part_is_lent_the_rest_one_tensor_at_a_time() -> None:
    some, every = (plan(EIGHT, None, machine(16, 8), n_ctx=4096, gpu_layers=n, draft_gpu_layers=0) for n in (20, 33))
    assert some.needs(1, "buffers") - every.needs(1, "buffers") == EIGHT.tensors["blk.0.ffn_up.weight"].n_bytes


def test_two_cards_hold_more_than_one() -> None:
    assert settle(SPEAKER, HELPER, machine(32, 16)).gpu_layers < 65
    assert settle(SPEAKER, HELPER, machine(32, 16, 16)).gpu_layers == 65


def test_the_drafter_follows_the_target_to_the_card() -> None:
    assert settle(SPEAKER, HELPER, machine(32, 24)).draft_gpu_layers == 6
    assert settle(SPEAKER, HELPER, machine(32)).draft_gpu_layers == 0
    given = [((3, None), 3), ((3, -1), 6), ((3, 0), 0), ((-1, None), 6), ((None, 2), 2), ((0, None), 0)]
    for (layers, own), expected in given:
        chosen = settle(SPEAKER, HELPER, machine(64, 48), gpu_layers=layers, draft_gpu_layers=own)
        assert chosen.draft_gpu_layers == expected


def test_a_context_that_was_asked_for_decides_about_the_layers() -> None:
    short, long = (settle(EIGHT, None, machine(64, 8), n_ctx=n) for n in (4096, 65536))
    assert (short.n_ctx, long.n_ctx) == (4096, 65536)
    assert short.gpu_layers > long.gpu_layers > 0


def test_a_card_that_tells_nothing_is_left_alone_unless_asked_for() -> None:
    pools = [*machine(16), Pool("CUDA0", 0, 0)]
    assert settle(EIGHT, None, pools).gpu_layers == 0
    assert settle(EIGHT, None, pools, gpu_layers=-1).gpu_layers == 33


# --- refusing


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        settle(*arguments, **options)
    return str(caught.value)


def ways(text: str) -> Iterator[dict[str, int]]:
    """The options a refusal proposes, each by itself."""
    for option, value in re.findall(r"(-c|-ngl) (\d+)", text.splitlines()[0]):
        yield {"n_ctx" if option == "-c" else "gpu_layers": int(value)}


@pytest.mark.parametrize(
    ("pools", "options", "n_ways"),
    [
        (machine(16), {"n_ctx": 2**18}, 1),
        (machine(32, 4), {"gpu_layers": -1}, 1),
        (machine(64, 8), {"gpu_layers": -1, "n_ctx": 65536}, 2),
        (machine(4, 8), {"gpu_layers": 0, "n_ctx": 4096}, 1),
    ],
)
def test_what_a_refusal_proposes_fits_and_a_little_more_would_not(
    pools: list[Pool], options: dict[str, int], n_ways: int
) -> None:
    text = refusal(EIGHT, None, pools, **options)
    assert "; what fits is -" in text.splitlines()[0]
    found = list(ways(text))
    assert len(found) == n_ways
    for way in found:
        assert settle(EIGHT, None, pools, **(options | way)).shortage() is None
        if "n_ctx" in way:
            refusal(EIGHT, None, pools, **(options | {"n_ctx": way["n_ctx"] + 256}))


def test_where_one_change_is_not_enough_both_are_proposed() -> None:
    pools = machine(14, 4)
    first = refusal(EIGHT, None, pools, n_ctx=131072, gpu_layers=-1).splitlines()[0]
    way = re.search(r"what fits is -c (\d+) -ngl (\d+)\.", first)
    assert way
    n_ctx, layers = map(int, way.groups())
    assert n_ctx >= 2048
    assert layers > 0
    assert settle(EIGHT, None, pools, n_ctx=n_ctx, gpu_layers=layers).shortage() is None
    refusal(EIGHT, None, pools, n_ctx=n_ctx + 256, gpu_layers=layers)


def test_a_refusal_is_one_sentence_and_the_plan_under_it() -> None:
    first, *table = refusal(EIGHT, None, machine(16, 4), gpu_layers=-1, n_ctx=8192).splitlines()
    assert re.fullmatch(
        r"made-up\.gguf with 8,192 tokens of context needs [\d.]+ GiB of CUDA0, which has 4\.0 GiB free of 4\.0 GiB; "
        r"what fits is -ngl \d+\.",
        first,
    )
    assert [line.split()[0] for line in table] == ["RAM", "target", "target", "target", "target", "needed", "free,"]
    assert len({len(line) for line in table}) == 1


def test_weights_larger_than_the_machine_ask_for_a_smaller_quantisation() -> None:
    text = refusal(EIGHT, None, machine(4))
    assert text.splitlines()[0] != refusal(EIGHT, None, machine(4), n_ctx=2**20).splitlines()[0]
    bits = re.search(r"a smaller quantisation with about ([\d.]+) bits a weight instead of 4\.5", text)
    assert bits
    assert 1 < float(bits[1]) < 4.5


def test_mapped_weights_need_not_be_free_memory() -> None:
    assert settle(EIGHT, None, machine(8, free=2), n_ctx=8192).shortage() is None  # 4.2 GiB of weights
    assert "RAM, which has 1.0 GiB free" in refusal(EIGHT, None, machine(8, free=1), n_ctx=8192)
    assert settle(EIGHT, None, machine(8, free=1, swap=1), n_ctx=8192).shortage() is None
    refusal(EIGHT, None, machine(8, 8, free=8), n_ctx=2**18, gpu_layers=0)


def test_a_card_needs_room_for_all_of_it() -> None:
    whole = plan(EIGHT, None, machine(64, 48), n_ctx=8192, gpu_layers=33, draft_gpu_layers=0)
    needed = (whole.needs(1) - whole.needs(1, "buffers") / 4) / GIB  # these are an estimate
    assert settle(EIGHT, None, machine(64, needed + 0.01), n_ctx=8192, gpu_layers=33).shortage() is None
    refusal(EIGHT, None, machine(64, needed - 0.01), n_ctx=8192, gpu_layers=33)


# --- held against llama.cpp


def test_the_batches_are_those_of_the_two_actors() -> None:
    assert (memory_plan.TARGET_BATCH, memory_plan.DRAFTER_BATCH) == (target.N_BATCH, drafter.N_BATCH)
    limits = (memory_plan.CHECKPOINTS, memory_plan.CHECKPOINTS_BYTES)
    assert limits == (checkpoints.MAX_CHECKPOINTS, checkpoints.MAX_BYTES)


@pytest.mark.parametrize("arch", ["llama", "qwen35", "muse-glimmer", "mamba"])
def test_checkpoints_are_as_large_as_planned(tmp_path: Path, arch: str) -> None:
    speaker = tiny.write_target(tmp_path / "t.gguf", arch)
    with open_pair(speaker, n_ctx=512, n_threads=1) as pair:
        pair.generate([1] * 100, max_tokens=1)
        kept = pair.engine.target._checkpoints.n_bytes
    planned = memory_plan._checkpoints(read_header(speaker), 512) // memory_plan.CHECKPOINTS
    assert planned == pytest.approx(kept, abs=2048)  # llama.cpp's own headers, for each layer and cell
    assert (planned > 0) == (arch != "llama")


def test_states_too_large_to_keep_are_not_planned_for() -> None:
    assert memory_plan._checkpoints(header(dense("gemma3", **LLAMA_8B), attention__sliding_window=8000), 8192) == 0


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    set_verbose(True)
    yield capsys
    set_verbose(False)


def logged(text: str, pattern: str) -> list[float]:
    """Sizes in bytes that llama.cpp logged in MiB."""
    return [float(size) * MIB for size in re.findall(pattern, text)]


CACHES = r"(?:kv_cache|recurrent): size = +([\d.]+) MiB"
BUFFERS = r"~llama_context: +CPU compute buffer size is +([\d.]+) MiB"  # when it closes: as large as it ever was


ROUNDING, QUARTER = 0.01 * MIB, 0.25


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen35", "muse-glimmer", "qwen2", "phi3", "olmo2"])
@pytest.mark.parametrize("n_ctx", [512, 3000])
def test_tiny_pairs(log: pytest.CaptureFixture[str], tmp_path: Path, arch: str, n_ctx: int) -> None:
    speaker = tiny.write_target(tmp_path / "t.gguf", arch)
    helper = tiny.write_drafter(tmp_path / "d.gguf", speaker, mrope=arch == "qwen35")
    planned = settle(read_header(speaker), read_header(helper), machine(64), n_ctx=n_ctx)
    with open_pair(speaker, helper, n_ctx=n_ctx, n_threads=1) as pair:
        pair.generate([1, 2, 3], max_tokens=4, draft_max=7)
        on_disk = sum(model.n_bytes for model in (pair.engine.target.model, pair.engine.drafter.model))
    text = log.readouterr().err
    assert planned.needs(0, "weights") == on_disk
    assert planned.needs(0, "memory") == pytest.approx(sum(logged(text, CACHES)), abs=4 * ROUNDING)
    helpers, speakers = logged(text, BUFFERS)
    buffers = {row.model: row.bytes[0] for row in planned.rows if row.kind == "buffers"}
    features = 4 * 512 * 2 * 288  # which stay in the graph where llama.cpp hands them out; that shows in no header
    spared = features if arch in ("qwen2", "phi3", "olmo2") else 0
    assert (1 - QUARTER) * speakers <= buffers["target"] <= (1 + QUARTER) * speakers + spared
    assert buffers["drafter"] == pytest.approx(helpers, rel=QUARTER)


def test_the_default_pair(log: pytest.CaptureFixture[str]) -> None:
    entry = registry.get(registry.DEFAULT)
    heads = read_header(entry.target_path()), read_header(entry.drafter_path())
    planned = settle(*heads, machine(64), n_ctx=4096)
    with open_pair(entry.target_path(), entry.drafter_path(), n_ctx=4096, n_threads=1) as pair:
        pair.generate([1, 2, 3], max_tokens=2, draft_max=7)
    text = log.readouterr().err
    assert planned.needs(0, "memory") == pytest.approx(sum(logged(text, CACHES)), abs=4 * ROUNDING)
    helpers, speakers = logged(text, BUFFERS)
    buffers = {row.model: row.bytes[0] for row in planned.rows if row.kind == "buffers"}
    assert buffers["target"] == pytest.approx(speakers, rel=QUARTER)
    assert buffers["drafter"] == pytest.approx(helpers, rel=QUARTER)


@pytest.fixture
def headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have llama.cpp load no weights and simulate its allocations: files of any size may be holes."""
    usual = C.llama_model_default_params

    def params() -> Any:
        result = usual()
        result.no_alloc, result.load_mode = True, 0
        return result

    monkeypatch.setattr(C, "llama_model_default_params", params)


LARGE = {
    "llama 8B": dense("llama", **(LLAMA_8B | {"n_layer": 4})),
    "qwen3 32B": dense("qwen3", **(QWEN3_32B | {"n_layer": 4})),
    "qwen3 30B-A3B": experts(**(QWEN3_32B | {"n_layer": 4, "n_embd": 2048, "n_head": 32, "n_kv": 4, "n_ff": 6144})),
    "qwen35 27B": hybrid(**(QWEN3_32B | {"n_layer": 4, "n_ff": 17408, "n_head": 24, "n_kv": 4, "head": 256})),
    "qwen35 4B": hybrid(n_value=32, **(QWEN3_32B | {"n_layer": 4, "n_embd": 2560, "n_ff": 9216, "n_head": 16})),
}


@pytest.mark.usefixtures("headers_only")
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("n_ctx", [4096, 32768])
def test_large_targets(log: pytest.CaptureFixture[str], tmp_path: Path, name: str, n_ctx: int) -> None:
    path = sparse(tmp_path / "large.gguf", LARGE[name])
    part = memory_plan.target_part(read_header(path), n_ctx, 7, 0)
    with Model(path, gpu_layers=0, repack=False) as model:
        rollback = 7 if model.is_recurrent else 0
        Context(model, n_ctx=n_ctx, n_batch=512, n_outputs=8, n_rollback=rollback, n_threads=1, exact=True).close()
    text = log.readouterr().err
    assert part.compute == pytest.approx(logged(text, r"CPU compute buffer size = +([\d.]+) MiB")[-1], rel=QUARTER)
    assert sum(part.memory) == pytest.approx(sum(logged(text, CACHES)), abs=2 * ROUNDING)


@pytest.mark.usefixtures("headers_only")
@pytest.mark.parametrize("n_ctx", [4096, 32768])
@pytest.mark.parametrize("window", [None, 2048])
def test_a_large_drafter(log: pytest.CaptureFixture[str], tmp_path: Path, n_ctx: int, window: int | None) -> None:
    speaker = sparse(tmp_path / "t.gguf", LARGE["qwen3 32B"])
    keys, shapes = dflash(3, **(QWEN3_32B | {"n_layer": 2, "n_ff": 17408, "n_head": 32}))
    if window:
        keys |= {"dflash.attention.sliding_window": window, "dflash.attention.sliding_window_pattern": [True, False]}
    helper = sparse(tmp_path / "d.gguf", (keys, shapes))
    part = memory_plan.drafter_part(read_header(helper), n_ctx, 3 * 5120, on_gpu=False)
    with (
        Model(speaker, gpu_layers=0, repack=False) as model,
        Context(model, n_ctx=n_ctx, n_batch=512, n_outputs=8, n_threads=1, exact=True) as other,
        Model(helper, gpu_layers=0, repack=False) as own,
    ):
        log.readouterr()
        sizes: Mapping[str, Any] = {"n_ctx": n_ctx + 8, "n_batch": 128, "n_outputs": 8, "embd_width": 3 * 5120}
        Context(own, **sizes, n_threads=1, other=other, flash=False, swa_full=True).close()
        text = log.readouterr().err
    assert part.compute == pytest.approx(logged(text, r"CPU compute buffer size = +([\d.]+) MiB")[-1], rel=QUARTER)
    assert sum(part.memory) == pytest.approx(sum(logged(text, CACHES)), abs=2 * ROUNDING)


# --- where users meet it


def test_options_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    speaker = tiny.write_target(tmp_path / "t.gguf")

    def run(*options: str) -> Result:
        return CliRunner().invoke(main, ["run", "-m", str(speaker), "-t", "1", "-p", "abc", "-n", "3", *options])

    said = {(done.exit_code, done.stdout) for n in ("auto", "all", "-1", "0", "99") for done in [run("-ngl", n)]}
    assert len(said) == 1
    assert next(iter(said))[0] == 0
    assert "must be auto, all or a number, not 'some'" in run("-ngl", "some").stderr
    monkeypatch.setattr(this_machine, "pools", lambda: machine(0.5))
    refused = run("-c", "16000000")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert re.match(r"Error: t\.gguf with 16,000,000 tokens .*; what fits is -c \d+\.\n +RAM\n", refused.stderr)


def test_load_refuses_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localspec.loading import load

    speaker = tiny.write_target(tmp_path / "t.gguf")
    monkeypatch.setattr(this_machine, "pools", lambda: machine(0.001))
    monkeypatch.setattr(load.trial, "check_that_it_loads", lambda *_, **__: pytest.fail("probed"))
    with pytest.raises(OptionError, match=r"t\.gguf with .* needs .* of RAM"):
        load.load(target=speaker)


def test_load_takes_what_the_plan_says_and_explains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localspec.loading import load

    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(this_machine, "pools", lambda: machine(16, free=0.01, swap=1))
    speaker, tables = tiny.write_target(tmp_path / "t.gguf"), list[str]()
    with load.load(target=speaker, n_threads=1, explain=tables.append) as loaded:
        assert loaded.n_ctx == 2048
    assert "target weights" in tables[0]
