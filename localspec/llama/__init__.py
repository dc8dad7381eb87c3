"""The one door to C: everything localspec asks of llama.cpp. No other module imports llama_cpp or ctypes."""

from localspec.llama.binding import gpu_offload, has_amx, set_verbose, system_info
from localspec.llama.context import Context, default_threads
from localspec.llama.header import Header, TensorInfo, read_header, read_typed
from localspec.llama.model import Model, Vocab, quantize
from localspec.llama.selftest import safe_to_repack

__all__ = [
    "Context",
    "Header",
    "Model",
    "TensorInfo",
    "Vocab",
    "default_threads",
    "gpu_offload",
    "has_amx",
    "quantize",
    "read_header",
    "read_typed",
    "safe_to_repack",
    "set_verbose",
    "system_info",
]
