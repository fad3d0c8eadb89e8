"""The compiler half of the backend: it is found, and refuses to compile."""

from triton.backends.compiler import BaseBackend


class CPUInterpBackend(BaseBackend):
    binary_ext = "none"

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "cpu-interp"

    def parse_options(self, options):
        raise RuntimeError("triton-cpu-interp compiles nothing: set TRITON_INTERPRET=1")

    def add_stages(self, stages, options, language):
        raise RuntimeError("triton-cpu-interp compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
