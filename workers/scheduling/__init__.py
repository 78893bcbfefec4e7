"""Decides which requests run in a step, and on which KV pages. No torch, no transport; the clock is handed in.

In the order of one step:

1. A request arrives.
   request          one request, and its output
   queues           admission, waiting and active requests, and the moves between them
2. The scheduler makes a plan.
   scheduler        builds a plan with the parts below; applies its result one step later
   rounds           chooses the requests that decode, their tree shape and pages
   prefill          chooses prompt chunks, and the requests that get a slot
   image_chunks     limits the images that a step encodes, and leaves out pixels that the ranks need not see
   encoded_images   which images' embeddings the ranks keep: the same decision on every rank
   prompt_order     lets prompts wait for a common prefix that another prompt computes; what gives way to the tenant
                    whose turn it is
   adapters         LoRA adapters by name: which requests have them, which are in the ranks' tables
   slot_lengths     host-side lengths of each slot's request
   slot_pages       slots, their page tables, and the pages that steps in flight may write
   state_saves      chooses when and where states of recurrent layers are saved
   commands         work between two steps, such as the capture of a CUDA graph
3. Predicted time limits the size of a plan.
   cost_table       milliseconds of steps, measured at the start
   step_time        current times of steps: the table, corrected by every step that ran
   latency_budget   limits the time of a step, and so its prompt tokens
4. Acceptance and time determine the tree shape.
   shapes           chooses the shape that rounds verify and draft
5. Ranks execute the plan, and their result is applied.
   plan             `StepPlan` and `StepResult`
   sequence         state of a request, and of a step in flight
   step_results     updates tokens, lengths and pages; reports to `step_time`, `shapes` and `queues.admission`
   stats            an engine's counters
"""
