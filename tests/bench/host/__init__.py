"""What a server costs beside its model: the parts of `make bench` that need no GPU.

startup         from `aerie serve` to the first answer; with --gpu dummy weights, kernels, graphs and a restart
memory          of all processes
coordinator     a step without a model
http_path       SSE events per second through Serve, and what HTTP adds to the first token
weight_updates  steps that wait for new weights
learning        a served draft that learns: tokens a round by minute, gaps while it trains
instant_server  an Aerie whose model takes no time (its engine: instant_engine)
finding         a figure and the bound that it should keep
"""
