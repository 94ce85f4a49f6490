"""Prefill and decode apart: one engine computes prompts, another one goes on from their KV blocks.

A hand-off is a prefix that the decode engine finds in its cache, and nothing else: the request itself never leaves the
decode side, which samples every token. So whatever is lost on the way is computed again, and no answer depends on it.

    decode side (decode.py)                               prefill side (prefill.py)
    Prompt   the whole blocks of a prompt            ->   queued
    Credit   so many blocks may come                 ->   prompts run, in order, as far as credit reaches
                                                     <-   Offer    computed; these are its blocks' keys
    Want     from which one on they are missing      ->
                                                     <-   Blocks   those, in the pool's wire layout
    the request runs, with a hit

Messages are in messages.py, who may send how much in credits.py. A link (link.py) carries them over any transport
(wires.py): torch.distributed between hosts, where a shared key tells who is who (signed.py), memory that is shared on
one. A peer that dies or falls silent ends its link, and what was under way on it is given to another, or computed by
the decode side where there is none.
"""
