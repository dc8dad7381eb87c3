"""The child process that asks llama.cpp for the layer inputs of a model, which kills it if there are none.

The model's graph is built without its weights, so that it takes a second and no memory; and nothing is computed.
"""

from __future__ import annotations

import os
import sys

from localspec.llama.binding import C, ext

N_CTX, TOO_MANY = 512, 400


def _ask(path: str) -> None:
    params = C.llama_model_default_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers = True, C.LLAMA_LOAD_MODE_NONE, 0
    model = C.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        sys.exit("llama.cpp cannot load it")
    settings = C.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = N_CTX, N_CTX, N_CTX
    settings.n_seq_max, settings.kv_unified = 2, False  # half of the context each
    ctx = C.llama_init_from_model(model, settings)
    if not ctx:
        sys.exit("llama.cpp opens no context for it")
    ext.set_embeddings_layer_inp(ctx, 0, True)
    tokens = (C.llama_token * TOO_MANY)()
    C.llama_decode(ctx, C.llama_batch_get_one(tokens, TOO_MANY))  # builds the graph, then finds no room for them


if __name__ == "__main__":
    _ask(sys.argv[1])
