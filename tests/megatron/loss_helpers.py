"""Models with router losses, and what Megatron makes of those."""

import torch

from tests.megatron.helpers import build_model, routers_of

KINDS = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
COEFFICIENT = 0.25


def build(kind="aux_loss", coefficient=COEFFICIENT, num_layers=1, **over):
    settings = {
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": coefficient,
        "moe_router_enable_expert_bias": False,
        "num_layers": num_layers,
        **over,
    }
    forget_logged_losses()
    return build_model(**settings)


def forget_logged_losses():
    """Megatron's log is process-global, sized by the first model's layers."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()
    else:
        get_moe_metrics_tracker()._metrics.clear()


class LossLog:
    """Every load-balancing loss that Megatron attaches, and each router's inputs, in order."""

    def __init__(self, model):
        self.losses, self.inputs = [], []
        self._routers = routers_of(model)

    def __enter__(self):
        from megatron.core.transformer.moe.router import TopKRouter

        self._original = TopKRouter.attach_and_log_load_balancing_loss
        log = self

        def attach(router, activation, coefficient, loss, *args, **options):
            log.losses.append(loss.detach().item())
            return log._original(router, activation, coefficient, loss, *args, **options)

        def keep(router, inputs):
            if torch.is_grad_enabled():
                log.inputs.append(inputs[0].detach().double().cpu().numpy())

        TopKRouter.attach_and_log_load_balancing_loss = attach
        self._hooks = [router.register_forward_pre_hook(keep) for router in self._routers]
        return self

    def __exit__(self, *exc):
        from megatron.core.transformer.moe.router import TopKRouter

        TopKRouter.attach_and_log_load_balancing_loss = self._original
        for hook in self._hooks:
            hook.remove()


def log_of_megatron():
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return {name: entry["values"].tolist()
                for name, entry in get_moe_layer_wise_logging_tracker().items()}  # fmt: skip
    metrics = get_moe_metrics_tracker()._metrics
    return {name: entry.values.tolist() for name, entry in metrics.items()}
