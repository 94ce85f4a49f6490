"""Golden data directories: what each release has left in mid-work, for every later version to upgrade and to finish.

`tests/data/golden/RELEASE/` holds a database, the objects of its bucket and what they are: `about.json`. The script
`python -m tests.golden.make` makes one with the code at hand; a release's is made once, when it is released, and never
changed afterwards. tests/faults/test_releases.py upgrades each and finishes it.
"""
