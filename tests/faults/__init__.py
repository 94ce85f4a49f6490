"""The fault matrix (job-queue.md, section 8): real processes, real faults, one judge.

`pytest -m faults tests/faults` runs all rows, `pytest -m "faults and quick_faults" tests/faults` those that CI runs.
`FAULT_SEED` repeats a run; a failed test prints the seed and the ends of its processes' logs.

A row in short:

    def test_row_11_killed_before_the_part_counts(cluster, judge):
        cluster.start("control")
        victim = cluster.start("engine", failpoints="part.stored=kill@2")
        job = cluster.submit(200)
        victim.died()                           # waits; -9
        cluster.start("engine")
        cluster.wait(job, "completed")
        verdict = judge(job)                    # I1 to I15; returns what it counted

`cluster` (tests/faults/cluster.py) has a fresh database, a fresh bucket, a wiped Valkey, a project with a key, and a
tiny model for the fake engine; services are shared by the session. Its database is SQLite unless the test is marked
`@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)`. Nothing runs until `start(role)`: "api" (the
first submit starts one), "control", "engine". Every setting may be changed a process: `start("engine",
BATCHSVC_FLUSH_S=1, AWS_ENDPOINT_URL_S3=proxy.url)`; `failpoints=` arms batchsvc/failpoints.py there, and
`cluster.passed(name)` counts what was armed and met. Processes are forked from a server that has the code imported, so
that a start takes a fraction of a second; they are real processes for `kill`, `stop`, `resume` (SIGSTOP, SIGCONT) and
`term`. `cluster.with_services(...)` is a cluster on services of the test's own.

`judge(job)` (tests/faults/judge.py) waits for nothing: it reads files, rows, ledger, witness, logs and what a client
saw, and asserts I1 to I15 as far as they apply to the batch's terminal status. `judge(job, errors={"code"})` allows
those codes of error lines beside the ones that the status brings.
"""
