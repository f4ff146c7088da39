import threading
from pathlib import Path

import pytest

from images.cache import key_of, made_once


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    calls = []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_text("made")

    target = tmp_path / "deep" / "thing"
    assert made_once(target, make) == target
    assert made_once(target, make).read_text() == "made"
    assert len(calls) == 1


def test_a_failed_attempt_leaves_nothing_that_looks_made(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("half")
        raise RuntimeError("killed")

    def make(path: Path) -> None:
        assert not path.exists()
        path.mkdir()

    target = tmp_path / "thing"
    with pytest.raises(RuntimeError, match="killed"):
        made_once(target, fail)
    assert not target.exists()
    made_once(target, make)
    assert list(target.iterdir()) == []


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    first_is_making, may_end = threading.Event(), threading.Event()
    calls = []

    def make(path: Path) -> None:
        calls.append(path)
        first_is_making.set()
        assert may_end.wait(10)
        path.write_text("made")

    target = tmp_path / "thing"
    threads = [threading.Thread(target=made_once, args=(target, make)) for _ in range(2)]
    threads[0].start()
    assert first_is_making.wait(10)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert target.read_text() == "made"
    assert len(calls) == 1


def test_keys_do_not_mix_up_parts() -> None:
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of("a", b"b") == key_of("a", "b")
