"""FILL, SET_ROWS and REPEAT of the native part over rows of one float, and what of these ops is left to ggml."""

from __future__ import annotations

import numpy as np
import pytest
from ggml_graph import F32, INT32, INT64, Graph, needs_native

pytestmark = needs_native
THREADS = (1, 2, 3)


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("value", [0.0, -np.inf, 1.5])
def test_fill(value: float, n_threads: int) -> None:
    graph = Graph()
    filled = graph.ggml.ggml_fill(graph.context, graph.tensor(np.zeros((7, 1001, 1), np.float32), F32), value)
    assert (graph.compute(filled, (7, 1001, 1), n_threads) == np.float32(value)).all()


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize(("kind", "dtype"), [(INT32, np.int32), (INT64, np.int64)])
@pytest.mark.parametrize("width", [1, 3])  # rows of 3 are ggml's
def test_set_rows(width: int, kind: int, dtype: type, n_threads: int) -> None:
    rng, graph = np.random.default_rng(0), Graph()
    whole = np.full((5, 400, width), -np.inf, np.float32)
    values = rng.normal(size=(5, 90, width)).astype(np.float32)
    rows = rng.permutation(400)[:90].astype(dtype)
    result = graph.ggml.ggml_set_rows(
        graph.context, graph.tensor(whole, F32), graph.tensor(values, F32), graph.tensor(rows, kind)
    )
    whole[:, rows] = values
    assert np.array_equal(graph.compute(result, whole.shape, n_threads), whole)


@pytest.mark.parametrize("n_threads", THREADS)
def test_set_rows_of_several_planes(n_threads: int) -> None:
    """Each plane may have rows of its own."""
    rng, graph = np.random.default_rng(1), Graph()
    whole, values = np.zeros((4, 50, 1), np.float32), rng.normal(size=(4, 20, 1)).astype(np.float32)
    rows = np.stack([rng.permutation(50)[:20] for _ in range(2)]).astype(np.int64)
    result = graph.ggml.ggml_set_rows(
        graph.context, graph.tensor(whole, F32), graph.tensor(values, F32), graph.tensor(rows, INT64)
    )
    for plane in range(4):
        whole[plane, rows[plane % 2]] = values[plane]
    assert np.array_equal(graph.compute(result, whole.shape, n_threads), whole)


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("source", [(3, 5, 4, 1), (3, 5, 1, 1), (1, 5, 4, 7)])  # the last two are ggml's
def test_repeat(source: tuple[int, ...], n_threads: int) -> None:
    graph, shape = Graph(), (3, 5, 4, 7)
    values = np.random.default_rng(0).normal(size=source).astype(np.float32)
    result = graph.ggml.ggml_repeat(
        graph.context, graph.tensor(values, F32), graph.tensor(np.zeros(shape, np.float32), F32)
    )
    assert np.array_equal(graph.compute(result, shape, n_threads), np.broadcast_to(values, shape))
