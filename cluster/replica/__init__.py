"""One engine on Ray: a Serve replica that owns a coordinator and a worker group, and replaces what fails.

engine             the Serve deployment
supervisor         starts coordinator and worker group, watches them, restarts them
coordinator_actor  the Ray actor around `cluster.coordinator`
worker_group       one epoch of workers: started, watched and killed together
worker_actor       the Ray actor of one rank
errors             why ranks could not be started
refusals           remembers a start that was refused
rank_process       ranks begun before Ray, and the actor's end of one; no Ray
worker_loop        a rank's loop: plans in, results and heartbeats out; no Ray
scaling            how many engines the load wants, for Serve's autoscaling; no Ray
plan_report        what the operator reads before and during a start
"""
