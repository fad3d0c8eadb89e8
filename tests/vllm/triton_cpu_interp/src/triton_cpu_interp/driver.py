"""The driver half: the CPU as the one device, with one stream that does nothing."""

import os
import time

import torch
from triton.backends.driver import DriverBase


class CPUInterpDriver(DriverBase):
    @classmethod
    def is_active(cls):
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty):
        return "void*"

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", "interp", 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def set_current_device(self, device):
        pass

    def get_device_interface(self):
        return torch.cpu

    def get_benchmarker(self):
        def bench(run, *_, quantiles=None, **__):
            begin = time.perf_counter()
            run()
            elapsed_ms = (time.perf_counter() - begin) * 1e3
            return elapsed_ms if quantiles is None else [elapsed_ms] * len(quantiles)

        return bench

    def get_empty_cache_for_benchmark(self):
        return torch.empty(1)

    def clear_cache(self, cache):
        pass
