"""A held collection: while somebody copies the bucket, no object goes; what was due goes afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

from sqlalchemy import select

from batchsvc.batches import collection_queries, garbage_queries
from batchsvc.batches.tables import CollectionLock, Garbage
from batchsvc.db.session import Database
from tests.workers.conftest import World
from workers.garbage import Collector


def collector(world: World) -> Collector:
    return Collector(world.settings.model_copy(update={"garbage_grace_s": -5.0}), world.db, world.store)


def put_due(world: World, *names: str) -> list[str]:
    for name in names:
        world.store.put(name, b"x")
    with world.db.transaction() as session:
        garbage_queries.discard(session, names)
    return list(names)


def stored(world: World) -> set[str]:
    return {key for key, _ in world.store.list_keys("")}


def test_nothing_goes_while_the_collection_is_held_and_all_of_it_afterwards(world: World) -> None:
    names = put_due(world, "batch/a/x", "batch/b/y", "in/p/file-a")
    orphan = "batch/never/part/z"
    world.store.put(orphan, b"x")
    with world.db.transaction() as session:
        until_ms = collection_queries.hold_collection(session, "backup:1", reason="a backup", hold_s=600)
        collection_queries.hold_collection(session, "backup:2", reason="another", hold_s=900)
    with world.db.reading() as session:
        assert [(one.holder, one.reason) for one in collection_queries.holds(session)] == [
            ("backup:1", "a backup"),
            ("backup:2", "another"),
        ]
        assert collection_queries.holds(session)[0].until_ms == until_ms
        assert not collection_queries.is_collecting(session)
    assert collector(world).delete_due() == collector(world).audit() == 0
    assert stored(world) >= {*names, orphan}
    with world.db.reading() as session:
        assert set(session.scalars(select(Garbage.s3_key))) == set(names), "what is due stays due"

    with world.db.transaction() as session:
        assert collection_queries.release_collection(session, "backup:1")
    assert collector(world).delete_due() == 0, "another one holds it still"
    with world.db.transaction() as session:
        assert collection_queries.release_collection(session, "backup:2")
        assert not collection_queries.release_collection(session, "backup:2")
    assert collector(world).delete_due() == len(names)
    assert collector(world).audit() == 1
    assert not stored(world) & {*names, orphan}


def test_a_hold_ends_by_itself_and_the_same_holder_moves_its_end(world: World) -> None:
    put_due(world, "batch/a/x")
    with world.db.transaction() as session:
        collection_queries.hold_collection(session, "killed", reason="a backup", hold_s=600)
        collection_queries.hold_collection(session, "killed", reason="a backup", hold_s=-1)
    with world.db.transaction() as session:
        assert collection_queries.holds(session) == []
    assert collector(world).delete_due() == 1
    with world.db.transaction() as session:
        assert not collection_queries.release_collection(session, "killed"), "so its copy may lack objects"
        assert session.scalars(select(CollectionLock.holder)).all() in ([], [""]), "what has ended is forgotten"


def test_who_holds_the_collection_sees_a_deletion_that_has_begun(world: World) -> None:
    put_due(world, "batch/a/x")
    is_deleting, may_go_on = threading.Event(), threading.Event()
    delete = world.store.delete

    def slow(names: list[str]) -> None:
        is_deleting.set()
        assert may_go_on.wait(30)
        delete(names)

    at_work = collector(world)
    at_work._store = type("Slow", (), {"delete": staticmethod(slow)})()  # type: ignore[assignment]
    thread = threading.Thread(target=at_work.delete_due)
    thread.start()
    try:
        assert is_deleting.wait(30)
        with world.db.transaction() as session:
            collection_queries.hold_collection(session, "backup", reason="a backup", hold_s=600)
            assert collection_queries.is_collecting(session)
            assert not collection_queries.begin_sweep(session, "another collector")
    finally:
        may_go_on.set()
        thread.join()
    with world.db.reading() as session:
        assert not collection_queries.is_collecting(session)
    assert "batch/a/x" not in stored(world)


def test_of_a_hold_and_a_deletion_at_the_same_moment_the_later_one_sees_the_earlier_one(migrated_url: str) -> None:
    """Neither sees what the other hasn't committed: so both lock one row first."""
    db = Database(migrated_url)
    try:
        with ThreadPoolExecutor(1) as pool:
            with db.transaction() as session:
                collection_queries.hold_collection(session, "backup", reason="a backup", hold_s=600)
                sweep = pool.submit(db.run, lambda inner: collection_queries.begin_sweep(inner, "collector"))
                assert not wait([sweep], timeout=0.3).done, "it waits for the hold to be committed"
            assert sweep.result(60) is False
            db.run(lambda session: collection_queries.release_collection(session, "backup"))
            with db.transaction() as session:
                assert collection_queries.begin_sweep(session, "collector")
                hold = pool.submit(_hold_and_look, db)
                assert not wait([hold], timeout=0.3).done
            assert hold.result(60) is True, "who holds it sees the deletion that has begun"
    finally:
        db.dispose()


def _hold_and_look(db: Database) -> bool:
    db.run(lambda session: collection_queries.hold_collection(session, "backup", reason="a backup", hold_s=600))
    return db.run(collection_queries.is_collecting)
