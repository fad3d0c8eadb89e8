"""A batch through Ray's object store: one copy in, none out, each rank its own part.

    refs = put_parts(batch, dp_size)                        # the controller, once a step
    ray.get([trainer.step.remote(ref) for trainer, ref in zip(trainers, refs)])

    def step(self, batch): ...                              # Ray resolves the reference
    batch = get_batch(ref)                                  # the same, where one was sent inside

Put and get cost what Ray costs for a NumPy array of the same bytes: packed fields are buffers
beside the pickle, which Ray writes into the store once and maps into every process of the host that
gets them. What is got keeps its object in the store until the last view of it is gone, whatever
becomes of the reference.

The pages are shared by all who got them, and Ray maps them writable: an in-place write to a packed
field would change it for every other process. Nothing here does; ``clone`` what must be written.
Dense and listed fields, which trainers do write, are copied as they arrive.

Ray is imported when one of these is called.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from packhorse._nvtx import ranged
from packhorse.packed.transport_parts import Shippable, check_kind, check_shippable, parts_of


@ranged
def put_batch(value: Shippable) -> Any:
    """Write a batch into Ray's object store, once.

    Args:
        value: a ``Batch``, ``PackedTensor`` or ``PackedRagged`` on the host. A slice ships its own
            rows alone; values that are not contiguous are copied once more on the way.

    Returns:
        A ``ray.ObjectRef``: hand it to tasks and actors in place of the batch, which would be put
        again for each of them. It belongs to this process, and is lost when that ends.

    Raises:
        ImportError: Ray is not installed (the extra ``ray``).
        RuntimeError: Ray is not started in this process.
        TypeError: ``value`` is another thing.
        ValueError: a field is on a device or requires grad; names it.

    Source: ``ray.put``; ``pickle`` protocol 5, out-of-band buffers.
    """
    name = "put_batch"
    ray = _started_ray(name)
    check_shippable(name, value)
    return ray.put(value)


@ranged
def put_parts(value: Shippable, parts: int | Sequence[Any]) -> list[Any]:
    """Write the part of each data-parallel rank into Ray's object store; a rank gets its own alone.

    Args:
        value: as ``put_batch`` takes it, of B trajectories.
        parts: how many, for parts of consecutive trajectories whose numbers differ by at most one
            (empty ones where B is too small); or by part what ``value[...]`` takes: a slice, or a
            list of trajectories. Those that stand one after another are put from where they are,
            others are gathered first, one part at a time.

    Returns:
        One ``ray.ObjectRef`` a part.

    Raises:
        ImportError, RuntimeError, ValueError: as ``put_batch``; nothing has been put by then.
        TypeError, ValueError, IndexError: a part names trajectories that are not there.
    """
    name = "put_parts"
    ray = _started_ray(name)
    check_shippable(name, value)
    selectors = parts_of(name, value, parts)
    return [ray.put(value[selector]) for selector in selectors]


@ranged
def get_batch(ref: Any, *, timeout_s: float | None = None) -> Any:
    """The batch behind a reference, its packed fields in the store's own pages.

    Args:
        ref: of ``put_batch`` or ``put_parts``, or of a task or actor's method that returns a batch.
            One below 100 KB that a task returned comes by message, not through the store.
        timeout_s: seconds to wait for it; None: as long as it takes.

    Returns:
        What was put: never written, ``clone`` it to write. It keeps its object in the store.

    Raises:
        ImportError, RuntimeError: as ``put_batch``.
        TypeError: ``ref`` is no ``ray.ObjectRef``, or another thing lies behind it.
        ray.exceptions.RayError: what ``ray.get`` raises: ``GetTimeoutError``, ``OwnerDiedError``
            where the process that put it has ended, the error of the task.
    """
    name = "get_batch"
    ray = _started_ray(name)
    if not isinstance(ref, ray.ObjectRef):
        what = "; a batch that a task was given is there already" if _is_batch(ref) else ""
        raise TypeError(f"{name}: ref must be a ray.ObjectRef, got {type(ref).__name__}{what}")
    value = ray.get(ref, timeout=timeout_s)
    check_kind(name, value, "the object")
    return value


def _is_batch(value: Any) -> bool:
    try:
        check_kind("", value)
    except TypeError:
        return False
    return True


def _started_ray(function: str) -> Any:
    try:
        ray = import_module("ray")
    except ImportError:
        raise ImportError(
            f"{function} needs the package ray: pip install 'packhorse[ray]'; share_batch needs no"
            " Ray, for processes of one host"
        ) from None
    if not ray.is_initialized():  # ray.put would start a cluster of its own
        raise RuntimeError(f"{function}: Ray is not started in this process; call ray.init() first")
    return ray
