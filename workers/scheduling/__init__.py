"""Decides which requests run in a step, and on which KV pages. No torch, no transport; the clock is handed in.

In the order of one step:

1. A request comes.
   request          one request, and its output
   queues           admission, waiting and active requests, and the moves between them
2. The scheduler makes a plan.
   scheduler        builds a plan with the parts below; applies its result one step later
   rounds           which requests decode, with which tree shape, on which pages
   prefill          which prompt chunks run, and which requests get a slot
   shared_prefixes  prompts that wait for the pages of one that is being computed
   slot_lengths     lengths of each slot's request, as the host knows them
   slot_pages       slots, their page tables, and the pages that steps in flight may write
   state_saves      when states of recurrent layers are saved, and where
   capture_pacing   when another CUDA graph is captured while the engine serves
3. Time decides how much a plan holds.
   cost_table       milliseconds of steps, as the start measured them
   timing           what steps take now: the table, corrected by every step that ran
   latency_budget   how long a step may take, and so how many prompt tokens it carries
4. Acceptance and time decide the tree shape.
   shape_choice     the shape that rounds verify and draft
   shape_rates      expected tokens and milliseconds of each shape
   shape_probes     steps of other shapes, to measure their acceptance and time
   acceptance       how many drafts of each shape are expected to be accepted
5. Ranks execute the plan, and their result is applied.
   plan             `StepPlan` and `StepResult`
   sequence         state of a request, and of a step in flight
   step_results     updates tokens, lengths and pages; reports to `timing`, `shape_choice` and `queues.admission`
   stats            an engine's counters
"""
