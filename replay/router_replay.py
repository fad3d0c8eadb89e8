"""One schedule's scope for Megatron's own ``RouterReplay``, for code that drives it itself.

    with scoped_router_replay():
        get_forward_backward_func()(...)  # forward_step calls RouterReplay.set_replay_data, ...

``RouterReplay`` keeps its state on instances in a process-global list: a target, an action, and a
queue to which every ``set_target_indices`` appends and from which only a recompute takes. What a
schedule leaves in the queue (a forward-only one leaves everything), the next schedule's recompute
takes for its own: with as many tokens no error is raised, and the gradients are those of other
routes. A ``ReplaySession`` uses none of it.

Megatron-core 0.16.1 to 0.19.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from packhorse._nvtx import ranged

_NAME = "scoped_router_replay"
_MODULE = "megatron.core.transformer.moe.router_replay"


@contextmanager
@ranged
def scoped_router_replay(*, left_over: Literal["refuse", "clear"] = "refuse") -> Iterator[None]:
    """Begin with no target, queue entry or action on any router, and leave none.

    Everything is dropped at the end, also after an exception and after a forward-only schedule;
    nothing is between microbatches, whose entries later recomputes need. Instances that are made
    inside, and those that leave the global list inside, are included. What was recorded, and
    Megatron's static buffers, are left alone: no router reads them, and a caller makes targets of
    them.

    Args:
        left_over: what to do with targets, queue entries and replay actions from before: "refuse",
            or "clear". A RECORD action is dropped in either case: Megatron's dynamic inference
            leaves it set after each step, and it has replayed nothing.

    Raises:
        ValueError: something is left over, which names the routers, or Megatron-core is older than
            0.16. Nothing was changed then.
    """
    if left_over not in ("refuse", "clear"):
        raise ValueError(f"{_NAME}: left_over must be 'refuse' or 'clear', got {left_over!r}")
    router_replay = _router_replay()
    instances = list(router_replay.global_router_replay_instances)
    if left_over == "refuse":
        _check_nothing_left(instances)
    try:
        _clear(instances)
        yield
    finally:
        _clear(instances)
        _clear(router_replay.global_router_replay_instances)


def _router_replay() -> Any:
    try:
        from megatron.core.transformer.moe.router_replay import RouterReplay
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            raise
        raise ValueError(
            f"{_NAME}: this Megatron-core has no RouterReplay; 0.16.1 is the first that can be used"
        ) from error
    return RouterReplay


def _check_nothing_left(instances: list[Any]) -> None:
    found = []
    for index, instance in enumerate(instances):
        left = []
        if instance.replay_backward_list:
            left.append(f"{len(instance.replay_backward_list)} in its queue")
        if instance.target_topk_idx is not None:
            left.append("a target")
        action = instance.router_replay_action
        if action is not None and action.name != "RECORD":
            left.append(f"action {action.name}")
        if left:
            found.append(f"router {index} has {', '.join(left)}")
    if found:
        more = f" (and {len(found) - 1} more routers)" if len(found) > 1 else ""
        raise ValueError(
            f"{_NAME}: RouterReplay is in use or was left as it was: of {len(instances)} instances"
            f" {found[0]}{more}. Put every schedule that replays in a scope of its own, not inside"
            " another, and set targets inside it; left_over='clear' drops them"
        )


def _clear(instances: list[Any]) -> None:
    """As ``clear_indices`` and ``clear_router_replay_action``, but for the recorded ids."""
    for instance in instances:
        instance.target_topk_idx = None
        instance.replay_backward_list = []
        instance.router_replay_action = None
