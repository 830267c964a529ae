"""Deterministic simulation of whole runs: the control plane as it is, in virtual time, with faults, from a seed.

What is real: the controller and its loop, the rollout pool, dispatch, the book of groups, the weight sync, the correction
service's preparation of batches, the learner group and the rank's order of calls, the rollout worker, packing, the ledger, the writers of
checkpoints and of lines, the run folder's checkpoints, and what a resume reads. What is played: Ray (processes.py: actors are objects in
this process, called with delays), SGLang (engine.py), Megatron (learner.py), the disk's pace (disk.py), the correction's mathematics, and
what only people read (parts.py). One event loop without selector and threads has the clock (clock.py).

A seed gives a run's shape, its delays and its faults (schedule.py); faults.py plays them:

    nodes           lost, with their workers and with the groups that these had finished, which lie there; and that come late again
    leaving         workers that end in order: told so, with their node, or as the pool shrinks; killed some time later
    workers         killed, stopped for a while, slow; their schedulers killed or stopped; answers that are garbage
    weight updates  broken off half-way, arriving with other bytes, given up by one side while the other goes on
    calls           late, made twice, run without the caller ever hearing of it; to the learner: never begun, as their batch is gone
    service, learner            killed, stopped, slow
    disk            full for a while, or so slow that each write takes seconds (disk.py)
    driver          killed at any step of the loop, or ended by SIGTERM, and resumed; its newest checkpoint damaged meanwhile

After every step of the loop, and at what crosses between parts, books.py checks: the book's balance; that no more groups are under way
than keep the staleness within its bound; no work for an engine without a receipt for the published version; in every batch, each group for
the first time, each token with a version, within the bound, and sampled by exactly the weights of that version, from which the learner's
present ones come (tokens are the names of the weights that sampled them); the ledger's file against what the weights were trained on; every
admitted prompt somewhere, once; no checkpoint lost that was told to be complete, nor a line that it counts on; each version exported once,
or three times where the run broadcasts, and hashed once. After the last fault a run has to be through within a bound of virtual time, and
only what may end a run may end it.

    python -m tests.simulation --seeds 0-9999           all that, on all cores; prints for each failure the seed, the command that plays it
                                                         again, and the smallest schedule of faults that still fails
    python -m tests.simulation --seed 17 --trace         one run, every event
    python -m tests.simulation --schedule '{...}'        one that a failure has printed
    python -m tests.simulation --planted --seeds 0-99    bugs planted on purpose (planted.py), and how many seeds each needs

The same seed gives the same events, in any process. It holds for one version of the code: any change of it moves delays, so a failure is
kept as a test by what it showed, not by its number.

Models: FoundationDB's simulation and TigerBeetle's VOPR (safety under any faults, then liveness when they have stopped).
"""
