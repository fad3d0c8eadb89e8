"""What vLLM's Model Runner V2 needs beside the backend to run under TRITON_INTERPRET=1."""

import os


def register():
    """Called by vLLM in each of its processes (``vllm.general_plugins``)."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter
    from vllm.v1.sample.ops import topk_topp_sampler

    # the interpreter cannot run the top-k/top-p kernel: vLLM's own PyTorch path stands in
    topk_topp_sampler.HAS_TRITON = False
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_takes_any_mask", False):
        return
    builder._takes_any_mask = True
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask):
        """The interpreter refuses masks that are not bool; the compiler takes them."""
        if mask.data.dtype == bool:
            return mask
        return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

    def create_masked_load(self, pointers, mask, *rest, **options):
        return load(self, pointers, as_bool(mask), *rest, **options)

    def create_masked_store(self, pointers, value, mask, *rest, **options):
        return store(self, pointers, value, as_bool(mask), *rest, **options)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
