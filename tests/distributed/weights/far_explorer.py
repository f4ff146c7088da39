"""An explorer of a Ray cluster without trainers: prints each version that it serves, as JSON."""

import json
from typing import Any

import torch
from trainsync import RunContext


class Engine:
    """Holds a copy of the weights."""

    def __init__(self) -> None:
        self.served: dict[str, torch.Tensor] = {}

    def begin_update(self, version: int) -> None:
        del version

    def load_weights(self, weights: Any) -> None:
        self.served = {name: tensor.clone() for name, tensor in weights}


def explore() -> None:
    engine = Engine()
    with RunContext.from_env() as ctx:
        client = ctx.explorer("far")
        version: int | None = -1
        while (version := client.update(engine, version)) is not None:
            values = {name: float(tensor.view(-1)[0]) for name, tensor in engine.served.items()}
            print(json.dumps([version, values]), flush=True)
        client.leave()


if __name__ == "__main__":
    explore()
