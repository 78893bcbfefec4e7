"""Which requests run in a step, and on which KV pages. No torch, no transport; the clock is handed in.

scheduler       decides what each step runs, and takes its result one step later
step_results    the part that is about results
prefill         the part that is about prompts: which chunks, and who is admitted
shared_prefixes prompts that wait for the pages of one that is being computed
cost_table      what steps cost, as measured
step_time       what steps take: the table, corrected by the steps that ran
latency_budget  how long a step may take, and so how many prompt tokens it carries
shape_choice    the tree shape that rounds verify and draft, by load and acceptance
shape_rates     what each shape is expected to bring and to take
shape_probes    steps of other shapes, to learn what the running one does not tell
survival        how many drafts of each shape are expected to be accepted
capture_pacing  when another step is captured while the engine serves
request_queues  who waits, who has a slot
slot_pages      slots, their page tables, and the pages that steps in flight may write
sequence        what is kept per request and per step in flight
request         one request, and what it hears back
plan            what travels to the ranks and back: `StepPlan` and `StepResult`
stats           what an engine counts
"""
