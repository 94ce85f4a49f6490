"""Distillation: what a model says on a project's own lines trains a smaller one, which drafts for it or serves alone.

1. `lines` reads the data: prompts with their answers; `answers` lets the teacher say those that are missing.
2. `capture` lets the teacher score every answer, and keeps what it would have said at each place as `targets`: its
   likeliest tokens and a sample of the others with weights, in `shards` on disk.
3. `student` begins with layers of the teacher, in their full precision.
4. `train` goes over the shards again and again: any loss over any batches, with checkpoints. `losses` are those of a
   student; a batch is a `pack` of examples that share their first tokens, and `forward` the pass that torch derives.
5. `evaluate` holds the student against lines that it has never seen, and `report` says what came of it.

`run` joins these. What is here loads torch; `batchsvc models distill` runs it as a process of its own.
"""
