"""Benchmarks. `python -m tests.bench` (`make bench`) measures what a CPU can show: startup, memory, embedded, step and
http_path, over served (a server as a child), instant_server (one whose model takes no time), sse_client, machine and
finding. round and coordinator also run alone; first_token (stamps, legs) traces a first token through a server,
open_loop (arrivals, stream_client, open_loop_figures, plot) loads one by the clock; served_model says which."""
