"""Bind a Megatron ``forward_step`` to a session.

session = ReplaySession(model, captured_layers=CapturedLayers.decoder(num_layers))

def forward_step(data_iterator, model, *, step):                     # 1: takes step
    ...model(..., padding_mask=step.padding_mask)                    # 2: masks what has no route

with session.schedule(microbatches):
    get_forward_backward_func()(
        forward_step_func=wrap_forward_step(forward_step, session),  # 3
        ...
    )
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from packhorse._nvtx import ranged
from packhorse.replay.session import ReplaySession


@ranged
def wrap_forward_step(
    forward_step: Callable[..., Any], session: ReplaySession
) -> Callable[..., Any]:
    """What Megatron's schedules take as ``forward_step_func``: begins each microbatch by itself.

    Args:
        forward_step: the trainer's, with a parameter ``step``: called as
            ``forward_step(data_iterator, model, ..., step=session.begin(model))``. Whatever else
            the schedule passes (``checkpoint_activations_microbatch``) is passed on.
        session: its schedule is open whenever the result is called.

    Raises:
        TypeError: ``forward_step`` takes no ``step``, so that its model would get no mask;
            ``session`` is something else.
    """
    name = "wrap_forward_step"
    if not isinstance(session, ReplaySession):
        raise TypeError(f"{name}: session must be a ReplaySession, got {type(session).__name__}")
    if not callable(forward_step):
        raise TypeError(
            f"{name}: forward_step must be a function, got {type(forward_step).__name__}"
        )
    if not _takes_step(forward_step):
        raise TypeError(
            f"{name}: forward_step must take step as a keyword; its padding_mask goes to the model"
        )

    @functools.wraps(forward_step)
    def begun(data_iterator: Any, model: Any, *args: Any, **options: Any) -> Any:
        return forward_step(data_iterator, model, *args, step=session.begin(model), **options)

    return begun


def _takes_step(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin says nothing
        return True
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    step = parameters.get("step")
    return step is not None and step.kind in (step.KEYWORD_ONLY, step.POSITIONAL_OR_KEYWORD)
