"""One engine on Ray: a Serve replica with a coordinator and a worker group, which replaces what fails.

engine             the Serve deployment; number of engines for the load, for Serve's autoscaling; no Ray; remembers a
                   refused start
supervisor         starts, watches and restarts coordinator and worker group; the Ray actor of
                   `aerie.cluster.coordinator`
learner_actor      the Ray actor that trains a draft that learns
worker_group       one epoch of workers: started, watched and killed together
worker_actor       the Ray actor of one rank
rank_process       ranks started before Ray, and their connection to the actor; no Ray
worker_loop        a rank's loop: plans in, results and heartbeats out; no Ray
plan_report        reports for the operator before and during a start
"""
