"""Whatever is wrong in a store, and wherever a repair of it is cut off, the next one mends it."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore
from trainsync.storage.inspect.repair import RepairPlan
from trainsync.storage.objects import keys, repair
from trainsync.storage.objects.bucket import ObjectBucket

from tests.unit.storage.objects.memory import CHECKPOINT, manifest_of, memory, save

STEPS = (1, 2, 3, 4)
STATES = ("none", "whole", "missing", "cut", "flipped", "not understood")


class Cut(MemoryStore):
    """Ends what uses it at the ``left``-th change, before it or after it."""

    left: int | None = None
    before = True

    def put(self, path: str, file: Any, **given: Any) -> Any:
        return self._change(lambda: MemoryStore.put(self, path, file, **given))

    def delete(self, paths: Any) -> Any:
        return self._change(lambda: MemoryStore.delete(self, paths))

    def _change(self, change: Any) -> Any:
        if self.left is None:
            return change()
        self.left -= 1
        if self.left < 0 and self.before:
            raise KeyboardInterrupt
        found = change()
        if self.left < 0:
            raise KeyboardInterrupt
        return found


def harm(bucket: ObjectBucket, step: int, state: str) -> None:
    (key,) = [info.key for info in bucket.below(keys.step_objects(step))]
    manifest = bucket.get(keys.manifest(CHECKPOINT, step))
    if state == "missing":
        bucket.delete([key])
    elif state in ("cut", "flipped"):
        data = b"dat" if state == "cut" else b"dbta"
        bucket.upload(key, iter([data]), len(data))
    elif state == "not understood":
        text = manifest.data.replace(b'"version": 1', b'"version": 2')
        bucket.replace(keys.manifest(CHECKPOINT, step), text, manifest)


def contents(bucket: ObjectBucket) -> dict[str, bytes]:
    return {info.key: bucket.get(info.key).data for info in bucket.below("")}


def plan(bucket: ObjectBucket, with_digest: bool) -> RepairPlan:
    return repair.plan_saves(bucket, with_digest=with_digest, threads=1)


@settings(max_examples=200, deadline=None)
@given(
    states=st.tuples(*(st.sampled_from(STATES) for _ in STEPS)),
    pointer=st.sampled_from([None, "x", "1\n", "2\n", "3\n", "4\n", "9\n"]),
    with_digest=st.booleans(),
    left=st.integers(0, 8),
    before=st.booleans(),
)
def test_what_is_whole_stays_and_the_pointer_names_the_newest_that_is_valid(
    states: tuple[str, ...], pointer: str | None, with_digest: bool, left: int, before: bool
) -> None:
    store = Cut()
    bucket = memory(store)
    found = {step: state for step, state in zip(STEPS, states, strict=True) if state != "none"}
    for step, state in found.items():
        save(bucket, manifest_of(step))
        harm(bucket, step, state)
    bucket.delete([keys.pointer(CHECKPOINT)])
    if pointer is not None:
        bucket.create(keys.pointer(CHECKPOINT), pointer.encode())
    at_first = contents(bucket)

    store.left, store.before = left, before
    try:
        for action in plan(bucket, with_digest).actions:
            assert action.do()
    except KeyboardInterrupt:
        pass
    store.left = None
    second = plan(bucket, with_digest)
    for action in second.actions:
        assert action.do()

    last = contents(bucket)
    good = {"whole"} if with_digest else {"whole", "flipped"}
    valid = [step for step, state in found.items() if state in good]
    if not valid:
        assert last == at_first
        assert len(second.refused) == (1 if found or pointer is not None else 0)
        return
    assert last[keys.pointer(CHECKPOINT)] == f"{max(valid)}\n".encode()
    for step, state in found.items():
        key = keys.manifest(CHECKPOINT, step)
        damaged = state in ("missing", "cut") or (
            with_digest and state == "flipped" and step > max(valid)
        )
        asides = [
            name for name in last if name.startswith(keys.step_objects(step)) and "MANIFEST" in name
        ]
        if damaged:
            assert key not in last
            assert [last[name] for name in asides] == [at_first[key]]
        else:
            assert last[key] == at_first[key]
            assert asides == []
    objects = {name: data for name, data in at_first.items() if name.startswith(keys.OBJECTS)}
    assert objects.items() <= last.items()
    third = plan(bucket, with_digest)
    assert (third.actions, third.refused) == ((), ())
