"""Speculation: something cheap proposes several tokens, the model checks them in one pass; the answer is the same.

A step computes, for a sequence that has a draft of k tokens, its last token and the draft, and samples after each of
these k + 1 rows, every row with the draw of its own position: the token that would be sampled there without a draft.
Sampled tokens count as long as each draft token before them is what was sampled in its place (verify.py). So a draft
decides how many tokens a step yields and never which: greedy or drawn, whatever filters, penalties and forms apply,
the answer is that of the same seed without speculation, and a resumed or preempted one goes on the same.

The rule of Leviathan (2211.17192) and Chen (2302.01318) would accept drawn drafts more often, with another draw for
each; but then the answer to a seed would depend on where drafts began, so on the load, and the design forbids that
(a rule whose output doesn't depend on the drafter: Daliri, Musco and Suresh, 2408.07978).
"""
