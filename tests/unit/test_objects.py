"""The object directory: counted by reader, released once, computed again when lost and needed."""

from __future__ import annotations

import pytest

from waypath.controller.objects import TRANSITIONS, ObjectDirectory, ObjectState
from waypath.proto.errors import GraphError, IllegalTransitionError, NotFoundError
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


def test_a_kept_object_outlives_its_readers_and_leaves_a_tombstone() -> None:
    directory = ObjectDirectory()
    directory.create("e/n", "me", ["reader"], kept=True)
    directory.add_part("e/n", "w", 4)
    directory.complete("e/n")
    directory.consumed("e/n", "reader")
    assert directory.bindable("e/n", "me").kept and directory.kept_by("me") == ["e/n"]
    assert directory.outputs_of("e") == ("n",) and directory.outputs_of("d") == ()
    with pytest.raises(NotFoundError, match="no object 'e/n' of you"):
        directory.bindable("e/n", "you")
    directory.let_go("e/n", "was deleted")
    with pytest.raises(GraphError, match="object e/n was deleted"):
        directory.bindable("e/n", "me")
    assert directory.release("e/n") == {"w": 4}
    directory.forget("e/n")
    with pytest.raises(GraphError, match="object e/n was deleted"):
        directory.bindable("e/n", "me")
    assert directory.kept_by("me") == [] and directory.outputs_of("e") == ()


def test_a_poisoned_object_holds_the_reason_and_can_only_be_released() -> None:
    directory = ObjectDirectory()
    directory.create("e/n", "me", [], kept=True)
    directory.add_part("e/n", "w", 4)
    error = NotFoundError("gone")
    assert directory.poison("e/n", error) == {"w": 4}
    assert directory["e/n"].error is error and directory["e/n"].state is ObjectState.POISONED
    for change in (directory.complete, directory.lose):
        with pytest.raises(IllegalTransitionError, match="is poisoned, cannot be"):
            change("e/n")
    with pytest.raises(IllegalTransitionError, match="is poisoned, a part came from w"):
        directory.add_part("e/n", "w", 4)
    assert directory.release("e/n") == {}


def test_a_promised_object_is_no_longer_bindable() -> None:
    directory = ObjectDirectory()
    directory.create("e/n", "me", [], kept=True).donated_to = "f/m"
    with pytest.raises(GraphError, match="object e/n is donated to f/m, nothing may read it after that"):
        directory.bindable("e/n", "me")
