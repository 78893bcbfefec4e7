"""The scheduler's loop: receives requests, keeps the ranks busy, sends tokens to the ingresses. Without Ray.

coordinator      the loop in a thread, driven from other threads; an administrator's calls of a weight transfer, as
                 commands
loop             the thread's work, one iteration at a time
draft_canary     runs prompts again after an update, so that a dead draft is named
expert_reads     last tokens wait until the routed experts of their requests have been read
plan_timing      the time to send the next plan: just before the running step ends
request_streams  clients: requests in, tokens and ends out; one request's tokens and end, on the way out
state_publisher  load and cached pages, by which ingresses choose an engine; the scheduler's counters as a message for
                 /health and /metrics
worker_links     ranks: plans out, results in, detection of hangs and deaths; checks the model after a request with
                 NaN or infinite logits
"""
