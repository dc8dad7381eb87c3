"""The one door to C: everything localspec asks of llama.cpp. No other module imports llama_cpp or ctypes."""

from localspec.llama import native
from localspec.llama.binding import gpu_offload, has_amx, set_verbose, system_info
from localspec.llama.context import Context, Sequences, default_threads
from localspec.llama.device import Device, devices
from localspec.llama.header import Header, TensorInfo, read_header, read_typed, with_shards
from localspec.llama.model import Model, Vocab, knows_architecture, quantize
from localspec.llama.selftest import safe_to_repack

__all__ = [
    "Context",
    "Device",
    "Header",
    "Model",
    "Sequences",
    "TensorInfo",
    "Vocab",
    "default_threads",
    "devices",
    "gpu_offload",
    "has_amx",
    "knows_architecture",
    "native",
    "quantize",
    "read_header",
    "read_typed",
    "safe_to_repack",
    "set_verbose",
    "system_info",
    "with_shards",
]
