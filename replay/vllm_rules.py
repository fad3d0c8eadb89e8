"""What each version of vLLM gets wrong in a capture, as a table of refusals.

A rule names a setting, the versions 0.first to 0.last in which a value of it makes routes, mask or
logprobs wrong, and why. Most of them are wrong without a sign; some end in an error that does not
say which setting it was. What the tables of later versions say is taken from their sources and
their issue threads; docs/capture.md says which versions were run.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

#: The newest minor version of 0.x whose sources were read; newer ones are taken to be like it.
NEWEST: Final = 33
#: First minor versions of 0.x that have a thing.
FIRST: Final = {
    "logprobs": 11,  # logprobs_mode="processed_logprobs"
    "flat logprobs": 12,
    "routes": 14,
    "routes over HTTP": 21,
    "routes from a row": 22,  # SamplingParams.routed_experts_prompt_start
    "routes from a row over HTTP": 28,
    "routes from the prompt's end": 30,  # before, the engine dies of it
    "mask": 28,
    "mask over HTTP": 28,
    "routes by runner 2": 31,
}

#: Lowest temperature that vLLM samples with; lower ones become this, below 1e-5 greedy.
LOWEST_TEMPERATURE: Final = 0.01

ROUTES, MASK, LOGPROBS, VALUES = "routes", "mask", "logprobs", "values"


class Rule(NamedTuple):
    """With one of ``needs`` wanted, a value of ``setting`` that is ``wrong`` is refused."""

    needs: str  # words of: routes, mask, logprobs (a support made of them), values (any logprob)
    first: int
    last: int
    setting: str  # engine.NAME, sampling.NAME, request.NAME or device
    wrong: Callable[[Any], bool]
    because: str
    example: Any  # a value that is refused
    device: str = ""  # only on this one


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {}


def _is_false(value: Any) -> bool:
    return value is False


def _not(default: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != default


def _of_draft_model(value: Any) -> bool:
    """A speculative configuration whose draft is a model."""
    method = value.get("method") if isinstance(value, Mapping) else None
    return value is not None and method not in ("ngram", "ngram_gpu", "suffix")


def _adaptive(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("enable_adaptive_verification"))


def _between_nodes(value: Any) -> bool:
    names = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector")
    text = repr(value)
    return any(name in text for name in (*names, "MooncakeConnector"))


def _flashinfer(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("flashinfer")


def _bounded(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("max_bytes") is not None


def _greedy(value: Any) -> bool:
    return value is not None and value < 1e-5


def _raised(value: Any) -> bool:
    return value is not None and 1e-5 <= value < LOWEST_TEMPERATURE


def _over_http(value: Any) -> bool:
    return value is not None


def _openai(value: Any) -> bool:
    return value in ("completions", "chat")


_DISTRIBUTION = "the trainer's logits have no such term: its logprobs are of another distribution"
_FORCED = "tokens are put there that were not sampled"
_FILTER = "it filters, and nothing captures what it left: ask for support, or for no logprobs"

RULES: Final = (
    # --- the engine, routes
    Rule(ROUTES, 14, NEWEST, "engine.enforce_eager", _is_false,
         "on a CPU the compiled model was traced without the capture: every route is zero",
         False, "cpu"),
    Rule(ROUTES, 14, NEWEST, "engine.enable_expert_parallel", _is_set,
         "the CPU's MoE kernel crashes", True, "cpu"),
    Rule(ROUTES, 14, 17, "device", _not("cuda"),
         "the routes' buffer is on a CUDA device whatever the engine's is", "cpu"),
    Rule(ROUTES, 28, 28, "device", _not("cuda"),
         "the CPU's MoE kernel cannot be captured", "cpu"),
    Rule(ROUTES, 14, NEWEST, "engine.pipeline_parallel_size", _above_one,
         "the routes of earlier stages are lost, or overwritten with zeros", 2),
    Rule(ROUTES, 14, NEWEST, "engine.decode_context_parallel_size", _above_one,
         "a rank captures its own tokens only", 2),
    Rule(ROUTES, 14, NEWEST, "engine.prefill_context_parallel_size", _above_one,
         "a rank captures its own tokens only", 2),
    Rule(ROUTES, 14, 19, "engine.data_parallel_size", _above_one,
         "rows of the ranks are not told apart, or the capture fails with modular kernels", 2),
    Rule(ROUTES, 14, 15, "engine.enable_eplb", _is_set,
         "ids are captured behind the mapping to physical experts", True),
    Rule(ROUTES, 14, 21, "engine.async_scheduling", _is_set,
         "rows are dropped or belong to another step", True),
    Rule(ROUTES, 14, 25, "engine.speculative_config", _of_draft_model,
         "the first MoE layer of the draft overwrites that of the model", {"method": "mtp"}),
    Rule(ROUTES, 31, NEWEST, "engine.speculative_config", _adaptive,
         "rows of adaptive verification are not captured",
         {"method": "mtp", "enable_adaptive_verification": True}),
    Rule(ROUTES, 14, 26, "engine.moe_backend", _flashinfer,
         "its monolithic kernels are not captured: every route is zero; 'triton' is",
         "flashinfer_trtllm"),
    Rule(ROUTES, 14, 30, "engine.kv_transfer_config", _is_set,
         "rows of tokens whose keys came from elsewhere are stale", {"kv_connector": "x"}),
    Rule(ROUTES, 31, NEWEST, "engine.kv_transfer_config", _between_nodes,
         "rows do not go from the prefill engine to the decoding one",
         {"kv_connector": "NixlConnector"}),
    Rule(ROUTES, 31, NEWEST, "engine.enable_prefix_caching", _is_false,
         "routes are kept with the blocks of the prefix cache", False),
    Rule(ROUTES, 31, 32, "engine.aux_output_config", _bounded,
         "the engine dies where its live blocks need more than max_bytes", {"max_bytes": 1 << 20}),
    # --- the engine, support and logprobs
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "engine.logprobs_mode",
         _not("processed_logprobs"),
         "others are not of the distribution that tokens were sampled from", "raw_logprobs"),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "engine.logits_processors", _is_set,
         f"what it does is not known, and {_DISTRIBUTION}", ["module:Class"]),
    Rule(MASK, 28, 31, "engine.speculative_config", _is_set,
         "masks are those of one token a step", {"method": "ngram"}),
    Rule(MASK, 32, NEWEST, "engine.speculative_config", _adaptive,
         "masks need fixed verification",
         {"method": "mtp", "enable_adaptive_verification": True}),
    Rule(MASK, 28, 31, "engine.enable_batch_sharded_sampling", _is_set,
         "masks are dropped when the ranks' samples are gathered", True),
    Rule(MASK, 28, NEWEST, "engine.return_sampling_mask", _is_false,
         "support='mask' is made of it", False),
    Rule(ROUTES, 14, NEWEST, "engine.enable_return_routed_experts", _is_false,
         "routes=True is made of it", False),
    # --- the request
    Rule(f"{MASK} {LOGPROBS}", 11, NEWEST, "sampling.temperature", _greedy,
         "greedy sampling applies no filter: there is no support", 0.0),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.temperature", _raised,
         f"vLLM takes {LOWEST_TEMPERATURE} in its place, and only its log says so", 0.001),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.repetition_penalty", _not(1.0),
         _DISTRIBUTION, 1.1),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.presence_penalty", _not(0.0),
         _DISTRIBUTION, 0.5),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.frequency_penalty", _not(0.0),
         _DISTRIBUTION, 0.5),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.logit_bias", _is_set,
         _DISTRIBUTION, {7: 1.0}),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.logits_processors", _is_set,
         f"what it does is not known, and {_DISTRIBUTION}", ["f"]),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.trace_decode_token_ids", _is_set,
         _FORCED, [1]),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.thinking_token_budget", _is_set,
         _FORCED, 9),
    Rule(f"{MASK} {LOGPROBS} {VALUES}", 11, NEWEST, "sampling.watermarking", _is_set,
         _DISTRIBUTION, True),
    Rule(f"{LOGPROBS} {VALUES}", 11, NEWEST, "sampling.logprob_token_ids", _is_set,
         "the logprobs of these ids take the place of the best ones", [1]),
    Rule(VALUES, 11, NEWEST, "sampling.top_k",
         lambda value: value is not None and value > 0, _FILTER, 20),
    Rule(VALUES, 11, NEWEST, "sampling.top_p", _not(1.0), _FILTER, 0.9),
    Rule(VALUES, 11, NEWEST, "sampling.min_p", _not(0.0), _FILTER, 0.1),
    Rule(VALUES, 11, NEWEST, "sampling.min_tokens", _not(0), _FILTER, 3),
    Rule(VALUES, 11, NEWEST, "sampling.allowed_token_ids", _is_set, _FILTER, [1]),
    Rule(VALUES, 11, NEWEST, "sampling.bad_words", _is_set, _FILTER, ["a"]),
    Rule(VALUES, 11, NEWEST, "sampling.structured_outputs", _is_set, _FILTER, {"json": "{}"}),
    # --- how it is sent
    Rule(ROUTES, 14, 20, "request.endpoint", _over_http, "replies have no routes", "completions"),
    Rule(MASK, 28, NEWEST, "request.endpoint", _openai,
         "its replies have no mask: '/inference/v1/generate' has, or support='logprobs'", "chat"),
    Rule(ROUTES, 14, 21, "request.streaming", _is_set,
         "the rows of a part are not those of its tokens", True),
)  # fmt: skip


def check_rules(
    name: str, minor: int, wants: frozenset[str], device: str, given: Mapping[str, Any]
) -> None:
    """Refuse the first of ``given`` (``engine.NAME``, ... -> value) that a rule names.

    Raises:
        ValueError: ``name: engine.NAME=value with vLLM 0.x: because``.
        TypeError: a value is not of the kind that is compared.
    """
    minor = min(minor, NEWEST)
    for setting, value in given.items():
        if isinstance(value, float) and value != value:
            raise ValueError(f"{name}: {setting} must be a number, got nan")
    for rule in RULES:
        if not wants & set(rule.needs.split()) or not rule.first <= minor <= rule.last:
            continue
        if rule.device and rule.device != device:
            continue
        if rule.setting not in given:
            continue
        try:
            wrong = rule.wrong(given[rule.setting])
        except TypeError:
            raise TypeError(
                f"{name}: {rule.setting} must be a number, got {given[rule.setting]!r}"
            ) from None
        if wrong:
            raise ValueError(
                f"{name}: {rule.setting}={given[rule.setting]!r} with vLLM 0.{minor}:"
                f" {rule.because}"
            )
