"""Whatever is uploaded, run, deleted and collected in whatever order: what somebody needs is there after every step,
and in the end nothing else is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchsvc import ids
from batchsvc.batches import deletion_service, finalize_queries, service
from batchsvc.batches.finalize_queries import ResultFile
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Part
from batchsvc.clock import now_ms
from batchsvc.errors import InvalidRequestError
from batchsvc.files import service as files
from batchsvc.files.tables import File
from batchsvc.store import keys
from tests.workers.conftest import World
from tests.workers.test_purge import add_input, discard, project_of, purge, purger, set_back, stored

Step = tuple[str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["upload", "create", "end", "delete_file", "delete_batch", "delete_both", "late", "collect"]),
        st.integers(0, 5),
    ),
    min_size=4,
    max_size=14,
)


@dataclass
class Made:
    """A batch of the model, and what it keeps in the bucket."""

    id: str
    input_id: str
    plan: set[str]
    parts: set[str] = field(default_factory=set)
    results: dict[str, str] = field(default_factory=dict)  # key by file id
    has_ended: bool = False
    is_deleted: bool = False


@dataclass
class Model:
    """What should be there."""

    world: World
    inputs: dict[str, File] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # ids of deleted files
    batches: list[Made] = field(default_factory=list)

    def do(self, name: str, index: int) -> None:
        if name == "upload" or not self.inputs:
            file = add_input(self.world)
            self.inputs[file.id] = file
        elif name == "create":
            self._create(list(self.inputs)[index % len(self.inputs)])
        elif name == "delete_file":
            self._delete_file(index)
        elif name == "collect":
            set_back(self.world, 10**9)
            purger(self.world).purge_due()
        elif self.batches:
            made = self.batches[index % len(self.batches)]
            if name == "end" and not made.has_ended:
                self._end(made)
            elif name == "late" and made.has_ended:
                self.world.store.put(keys.part(made.id, 9, ids.part_id()), b"late")
            elif name in ("delete_batch", "delete_both") and not made.is_deleted:
                self._delete_batch(made, with_input=name == "delete_both")

    def needed(self) -> set[str]:
        """The objects that somebody may ask for."""
        found = set[str]()
        for file_id, file in self.inputs.items():
            if file_id not in self.gone:
                found |= {file.s3_key, keys.plain_input(file.s3_key)}
        for made in self.batches:
            live = {key for file_id, key in made.results.items() if file_id not in self.gone}
            found |= live
            if not made.has_ended:
                found |= made.plan
            elif live == set(made.results.values()):
                found |= made.parts
        return found

    def _create(self, file_id: str) -> None:
        if file_id in self.gone:
            with self.world.db.transaction() as session:
                assert files.find_for_batch(session, project_of(self.world), file_id) is None
            return
        batch_id = self.world.add_batch(num_lines=2, unit_lines=1)
        self.world.set_batch(batch_id, input_file_id=file_id)
        made = Made(batch_id, file_id, stored(self.world, keys.of_batch(batch_id)))
        self.batches.append(made)

    def _end(self, made: Made) -> None:
        world, results = self.world, []
        key = keys.part(made.id, 1, ids.part_id())
        made.parts = {key}
        for kind in keys.OUTPUT_KINDS:
            out = keys.output(made.id, 1, kind)
            results.append(
                ResultFile(kind=kind, s3_key=out, etag=world.store.put(out, b"{}\n"), sha256="0", size_bytes=3)
            )
        world.store.put(key, b"part")
        world.set_batch(made.id, status=Status.FINALIZING, why=Status.COMPLETED, fin_epoch=1)
        with world.db.transaction() as session:
            values: dict[str, Any] = {"sha256": "0", "epoch": 1, "created_ms": now_ms()}
            session.add(Part(id=ids.part_id(), batch_id=made.id, window_no=0, s3_key=key, **values))
            session.flush()
            assert finalize_queries.publish(session, made.id, 1, results, completed=1, failed=1, file_ttl_s=3_600)
        row = world.batch(made.id)
        file_ids = (row.output_file_id or "", row.error_file_id or "")
        made.results = {file_id: one.s3_key for file_id, one in zip(file_ids, results, strict=True)}
        made.has_ended = True

    def _delete_file(self, index: int) -> None:
        named = [*self.inputs, *(file_id for made in self.batches for file_id in made.results)]
        file_id = named[index % len(named)]
        if file_id in self.gone:
            return
        readers = [made.id for made in self.batches if made.input_id == file_id and not made.has_ended]
        refusal = None
        try:
            with self.world.db.transaction() as session:
                project_id = session.get_one(File, file_id).project_id
                files.delete(session, project_id, file_id, live_batch_of=service.live_batch_of, discard=discard)
        except InvalidRequestError as error:
            refusal = error.message
        assert (refusal is not None) == bool(readers)
        assert refusal is None or any(reader in refusal for reader in readers)
        if refusal is None:
            self.gone.add(file_id)

    def _delete_batch(self, made: Made, *, with_input: bool) -> None:
        others = [one.id for one in self.batches if one.input_id == made.input_id and not one.has_ended]
        project_id, refusal = project_of(self.world), None
        try:
            with self.world.db.transaction() as session:
                deletion_service.delete_batch(session, project_id, made.id, with_input=with_input, discard=discard)
        except InvalidRequestError as error:
            refusal = error.message
        input_is_read = with_input and bool(others) and made.input_id not in self.gone
        assert (refusal is not None) == (not made.has_ended or input_is_read)
        assert refusal is None or made.id in refusal or any(one in refusal for one in others)
        if refusal is None:
            made.is_deleted = True
            self.gone |= {*made.results, *({made.input_id} if with_input else ())}


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps)
def test_what_is_needed_stays_and_what_was_deleted_goes(world: World, done: list[Step]) -> None:
    before = stored(world)
    model = Model(world)
    for name, index in done:
        model.do(name, index)
        assert model.needed() <= stored(world), f"after {name}"
    purge(world)
    late = {key for key in stored(world) if "/9-" in key}  # stored when its batch was wiped for good: for the audit
    assert stored(world) - before - late == model.needed() - before
