"""The scheduler at work: takes requests, keeps the ranks busy, sends tokens to the ingresses. Knows no Ray.

coordinator   the loop in a thread, driven from other threads
loop          what the thread does, turn by turn
worker_links  its ranks: plans out, results in, stamps that show a hang or a death
publisher     tokens out, one message per ingress and step
stats         the scheduler's counters as the message of /health and /metrics
"""
