"""`plain`: values of other libraries become values that a checkpoint may hold."""

import io
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from trainsync.engines.builtin_types import plain


def test_numpys_generator_survives_loading_without_execution() -> None:
    state = {"numpy": np.random.get_state(), "random": random.getstate()}
    expected = np.random.random(5).tolist(), random.random()
    file = io.BytesIO()
    torch.save(plain(state), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    np.random.random(100)
    random.random()
    np.random.set_state(loaded["numpy"])
    random.setstate(loaded["random"])
    assert (np.random.random(5).tolist(), random.random()) == expected


def test_numbers_of_numpy_become_pythons() -> None:
    found = plain({"a": [np.float32(0.5), (np.int64(3),)], "b": OrderedDict(c=np.bool_(True))})
    assert found == {"a": [0.5, (3,)], "b": OrderedDict(c=True)}
    assert type(found["a"][0]) is float
    assert type(found["b"]) is OrderedDict


def test_tensors_and_unknown_values_stay_what_they_are() -> None:
    tensor, other = torch.ones(2), object()
    found = plain([tensor, other])
    assert found[0] is tensor
    assert found[1] is other


def test_configuration_containers_become_lists_and_dicts() -> None:
    class Betas(list[Any]):
        pass

    class Config(dict[str, Any]):
        pass

    Betas.__module__ = Config.__module__ = "omegaconf.listconfig"
    found = plain({"betas": Betas([0.9, 0.95]), "more": Config(a=Betas([1]))})
    assert found == {"betas": [0.9, 0.95], "more": {"a": [1]}}
    assert type(found["betas"]) is list
    assert type(found["more"]) is dict
