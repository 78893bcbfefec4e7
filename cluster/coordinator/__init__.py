"""The scheduler at work: takes requests, keeps the ranks busy, sends tokens to the ingresses. Knows no Ray.

coordinator      the loop in a thread, driven from other threads
loop             what the thread does, turn by turn
model_check      whether the model still computes numbers, once a request has ended because it did not
plan_timing      when the next plan leaves: just before the step that runs ends
request_streams  clients: requests in, tokens and ends out
state_publisher  load and cached pages, for the ingresses' choice between engines
publisher        tokens out, one message per ingress and step
worker_links     ranks: plans out, results in, stamps that show a hang or a death
stats            the scheduler's counters as the message of /health and /metrics
"""
