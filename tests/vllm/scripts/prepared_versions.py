"""A worker of vLLM prepares versions as it serves: ``prepared_versions.py MODEL FILE FILE FILE``.

Prints ``CASE NAME`` for each case that went well.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file
from trainsync.engines.servers.preparing import ABANDON, PREPARE, PREPARED
from trainsync.integrations.vllm import loaded_model, transfer, twin
from trainsync.weights.staging.area import StagingArea
from vllm import LLM, SamplingParams

_OPTIONS: dict[str, Any] = {
    "weight_transfer_config": {"backend": "trainsync"},
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "dtype": "bfloat16",
}
_SAMPLING = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
_SECONDS = 120.0

Answer = tuple[list[int], list[float]]


class Worker:
    """vLLM in this process, and versions for it."""

    def __init__(self, model: str, files: list[str]) -> None:
        self._llm = LLM(model, **_OPTIONS)
        self._area = StagingArea()
        self._files = files
        self.answers: list[Answer] = []
        self.engine = (
            self._llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
        )

    def say(self) -> Answer:
        """An answer, which tells the weights to the last bit."""
        prompt = {"prompt_token_ids": [3, 14, 15, 92, 65, 35]}
        said = self._llm.generate(prompt, _SAMPLING, use_tqdm=False)[0].outputs[0]
        rows = zip(said.logprobs, said.token_ids, strict=True)
        return list(said.token_ids), [row[token].logprob for row, token in rows]

    def stage(self, number: int) -> dict[str, Any]:
        """Lay a version out, and let the worker look at it."""
        told = self._area.stage(number, load_file(self._files[number])).as_dict()
        self.call("init_weight_transfer_engine", init_info=told)
        return told

    def prepare(self) -> str:
        """The outcome of a preparation, and the reason."""
        self.call(PREPARE, seconds=_SECONDS)
        deadline = time.monotonic() + _SECONDS
        while (answer := self.call(PREPARED))["outcome"] is None:
            assert time.monotonic() < deadline, "the preparation does not end"
            self.say()
        return f"{answer['outcome']}: {answer['reason']}"

    def load(self, told: dict[str, Any]) -> None:
        """Update to what was staged."""
        self.call("start_weight_update")
        self.call("update_weights", update_info=told)
        self.call("finish_weight_update")

    def call(self, method: str, **arguments: Any) -> Any:
        """The worker's answer."""
        return self._llm.collective_rpc(method, timeout=_SECONDS, kwargs=arguments)[0]

    def serve(self, number: int) -> None:
        """Load a version by vLLM's reload, without preparation."""
        with _counted(loaded_model.LoadedModel, "load") as loads:
            self.load(self.stage(number))
        assert len(loads) == 1

    def loader(self, load: Callable[[Any, Any], Any]) -> AbstractContextManager[Any]:
        """In the block, the model's ``load_weights``."""
        return patch.object(type(self.engine.model), "load_weights", load)

    def memory(self) -> list[int]:
        """Where the weights lie that layers keep."""
        return [value.data_ptr() for value in self.engine.model.parameters()]


@contextmanager
def _counted(kind: type, method: str) -> Iterator[list[int]]:
    calls: list[int] = []
    whole = getattr(kind, method)

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return whole(*arguments)

    with patch.object(kind, method, counted):
        yield calls


def _prepared(worker: Worker) -> None:
    said = worker.prepare()
    assert said == "prepared: ", said


def prepared_version_serves_as_after_a_reload(worker: Worker) -> None:
    """In the same memory, and without a reload; the version before serves meanwhile."""
    worker.serve(0)
    memory = worker.memory()
    for number, before in ((1, 0), (2, 1), (0, 2)):  # also after a prepared version
        told = worker.stage(number)
        _prepared(worker)
        assert worker.say() == worker.answers[before]
        with _counted(loaded_model.LoadedModel, "load") as loads:
            worker.load(told)
        assert loads == []
        assert worker.say() == worker.answers[number]
        assert worker.memory() == memory


def version_that_was_given_up_is_loaded_in_the_pause(worker: Worker) -> None:
    """Whether it was ready or not."""
    for wait in (False, True):
        worker.serve(0)
        told = worker.stage(1)
        worker.call(PREPARE, seconds=_SECONDS)
        if wait:
            worker.prepare()
        worker.call(ABANDON)
        assert worker.say() == worker.answers[0]
        worker.load(told)
        assert worker.say() == worker.answers[1]


def superseded_version_is_not_served(worker: Worker) -> None:
    """The next one is, prepared."""
    worker.serve(0)
    worker.stage(1)
    worker.prepare()
    told = worker.stage(2)
    assert worker.call(PREPARED)["outcome"] == "late"
    _prepared(worker)
    assert worker.say() == worker.answers[0]
    worker.load(told)
    assert worker.say() == worker.answers[2]


def _falls_back(worker: Worker, outcome: str, *patches: AbstractContextManager[Any]) -> None:
    """A preparation fails, the version before serves, and the next one comes by a reload."""
    worker.serve(0)
    told = worker.stage(1)
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        said = worker.prepare()
    assert said.startswith(outcome), said
    assert worker.say() == worker.answers[0]
    worker.load(told)
    assert worker.say() == worker.answers[1]


def full_memory(worker: Worker) -> None:
    """Nothing is allocated."""
    _falls_back(
        worker,
        "no_memory: a second copy of the weights needs",
        patch.object(transfer, "free_memory", lambda: 1000),
        patch.object(transfer, "Twin", side_effect=AssertionError),
    )


def loader_that_fails_half_way(worker: Worker) -> None:
    """As with a name that the model does not have."""
    load = type(worker.engine.model).load_weights

    def half(model: Any, weights: Any) -> Any:
        taken = list(weights)
        load(model, taken[: len(taken) // 2])
        raise OSError("half of it")

    _falls_back(worker, "failed: half of it", worker.loader(half))


def loader_that_forgets_a_layer(worker: Worker) -> None:
    """The count of loaded parameters shows it."""
    load = type(worker.engine.model).load_weights

    def most(model: Any, weights: Any) -> Any:
        return load(model, [named for named in weights if "layers.1." not in named[0]])

    _falls_back(worker, "failed: ", worker.loader(most))


def loader_that_writes_to_what_serves(worker: Worker) -> None:
    """It is stopped before it does."""
    served = next(value for value in worker.engine.model.parameters() if value.numel())

    def both(model: Any, weights: Any) -> Any:
        served.add_(1)

    message = "impossible: the model's loaders write to the weights that serve"
    _falls_back(worker, message, worker.loader(both))


def layers_that_are_processed_wrongly(worker: Worker) -> None:
    """Their comparison with the staged weights shows it."""
    process = twin._process

    def wrong(layer: Any) -> None:
        for value in layer.parameters(recurse=False):
            value.mul_(2)
        process(layer)

    _falls_back(worker, "failed: ", patch.object(twin, "_process", wrong))


def layer_of_another_kind(worker: Worker) -> None:
    """Such as one of quantised weights."""
    _falls_back(worker, "impossible: ", patch.object(twin, "_PACK", ()))


def layer_that_is_missed_in_the_pause(worker: Worker) -> None:
    """The update fails, and the next one loads everything anew."""
    worker.serve(0)
    told = worker.stage(1)
    _prepared(worker)
    make = transfer.Replacement.make

    def most(replacement: Any) -> Any:
        kept = replacement.swaps[0].layer.cpu_linear
        before = make(replacement)
        replacement.swaps[0].layer.cpu_linear = kept
        return before

    with patch.object(transfer.Replacement, "make", most):
        try:
            worker.load(told)
        except Exception as error:  # noqa: BLE001 - vLLM's own, which names ours
            assert "1 layers have other weights than prepared" in str(error), error
        else:
            raise AssertionError("the update succeeded")
    worker.load(worker.stage(1))
    assert worker.say() == worker.answers[1]


CASES: tuple[Callable[[Worker], None], ...] = (
    prepared_version_serves_as_after_a_reload,
    version_that_was_given_up_is_loaded_in_the_pause,
    superseded_version_is_not_served,
    full_memory,
    loader_that_fails_half_way,
    loader_that_forgets_a_layer,
    loader_that_writes_to_what_serves,
    layers_that_are_processed_wrongly,
    layer_of_another_kind,
    layer_that_is_missed_in_the_pause,
)


def main(model: str, *files: str) -> None:
    """Run all cases."""
    worker = Worker(model, list(files))
    for number in range(len(files)):
        worker.serve(number)
        worker.answers.append(worker.say())
    assert worker.answers[0] != worker.answers[1] != worker.answers[2]
    for case in CASES:
        try:
            case(worker)
        except Exception:  # noqa: BLE001 - told, and the test misses its line
            print(f"{case.__name__}:", flush=True)
            traceback.print_exc()
        else:
            print(f"CASE {case.__name__}", flush=True)
    print(f"CASES {len(CASES)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
