"""The object directory: counted by reader, released once, computed again when lost and needed."""

from __future__ import annotations

import pytest

from waypath.controller.objects import TRANSITIONS, ObjectDirectory, ObjectState
from waypath.proto.errors import IllegalTransitionError, NotFoundError
from waypath.proto.names import object_id

OID = object_id("e", "generate_0")


def held() -> ObjectDirectory:
    directory = ObjectDirectory()
    directory.create(OID, "run", ["score", "train"])
    directory.add_part(OID, "w0", 10)
    directory.add_part(OID, "w1", 5)
    directory.complete(OID)
    return directory


def test_life_of_an_object() -> None:
    directory = held()
    assert OID == "e/generate_0" and directory[OID].nbytes == 15
    assert directory.held_on("w1") == 5 and directory.held_on("w2") == 0
    directory.consumed(OID, "train")
    directory.consumed(OID, "train")
    assert directory[OID].needed_by == {"score"}, "a reader that runs twice counts once"
    directory.consumed(OID, "score")
    assert directory.release(OID) == {"w0": 10, "w1": 5}
    assert directory[OID].nbytes == 0 and directory[OID].state is ObjectState.RELEASED


def test_lost_objects_are_pending_again_with_no_parts() -> None:
    directory = held()
    directory.lose(OID)
    assert directory[OID].state is ObjectState.PENDING and directory[OID].parts == {}
    directory.complete(OID)
    directory.release(OID)
    directory.need(OID, "score")
    directory.lose(OID)
    assert directory[OID].state is ObjectState.PENDING


def test_owners() -> None:
    directory = held()
    directory.create("f/x", "run", [])
    directory.create("g/x", "other", [])
    assert directory[OID].owner == "run"
    directory.forget(OID)
    directory.forget(OID)
    directory.forget("f/x")
    assert len(directory) == 1


def test_illegal_moves_tell_the_objects_story() -> None:
    directory = held()
    with pytest.raises(IllegalTransitionError, match="e/generate_0 is held, cannot be computed: pending → held"):
        directory.complete(OID)
    with pytest.raises(IllegalTransitionError, match="is held, a part came from w2"):
        directory.add_part(OID, "w2", 1)
    with pytest.raises(IllegalTransitionError, match="exists already"):
        directory.create(OID, "run", [])
    directory.release(OID)
    with pytest.raises(IllegalTransitionError, match="is released, cannot be released: pending → held"):
        directory.release(OID)
    with pytest.raises(NotFoundError, match="no object 'e/nothing'"):
        directory.consumed("e/nothing", "train")


def test_the_table_knows_every_state() -> None:
    assert set(TRANSITIONS) == set(ObjectState)
