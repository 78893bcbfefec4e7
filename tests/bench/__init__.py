"""Benchmarks: `python -m tests.bench` lists them, `python -m tests.bench NAME [options]` runs one.

round, sampling, grammar             engines with dummy weights, without HTTP; models: `models`
embedded                             the embedded pair, without HTTP
shapes                               adaptive tree shapes against static ones
trace, profile_round                 what torch's profiler sees of a round
open_loop, replicas                  load over HTTP, sent by `aerie.deploy.bench`
served, served_model                 a server as a child process, and the model it serves
kernels/                             one layer's kernels beside the rate of a copy
host/                                what a server costs beside its model
tracing/                             where the time of a first token goes
quality/                             accuracy and acceptance of a running server
results                              today's figures: results.jsonl, and the tables of RESULTS.md
machine                              where and when figures are measured
"""
