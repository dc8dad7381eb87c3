"""Settings for all tests: threads that sleep while they wait, so that they share a machine; which files are slow."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

FOLDER = Path(__file__).parent
SLOW = {  # files that take more than some seconds: `make test-fast` leaves them out
    *("test_default_pair", "test_packaging", "test_pair", "test_tiny"),
    *("cli/test_commands", "cli/test_surroundings", "cli/test_terminal"),
    *(
        "convert/test_convert_app",
        "convert/test_convert_drafter",
        "convert/test_convert_target",
        "convert/test_convert_tokenizer",
    ),
    *("distill/test_distill_collect", "distill/test_distill_evaluate", "distill/test_distill_pipeline"),
    *("distill/test_distill_synthesise", "distill/test_distill_train", "distill/test_distill_model"),
    *("engine/test_accept", "engine/test_engine", "engine/test_exactness", "engine/test_states"),
    *("evaluation/test_check", "evaluation/test_doctor", "hub/test_pull", "hub/test_wheel"),
    *("llama/test_decode_thread", "llama/test_layer_inputs", "llama/test_native", "llama/test_native_attention"),
    *("llama/test_native_products", "loading/test_memory_plan", "loading/test_refusals"),
    *("planning/test_measure", "planning/test_simulation"),
}


def is_slow(path: Path) -> bool:
    return path.is_relative_to(FOLDER) and path.relative_to(FOLDER).with_suffix("").as_posix() in SLOW


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are not wanted, what they import (torch, transformers) is not imported either."""
    return True if config.option.markexpr == "not slow" and is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")
