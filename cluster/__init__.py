"""From HTTP to ranks, on Ray. The only folder, with `deploy`, that imports Ray.

From the bottom up; each imports only what stands above it (tests/cluster/test_rooms.py):

    linux        what a process asks of Linux for itself
    environment  the environment variables of a process
    logs         log lines as JSON
    transport    what travels between the processes, and on what sockets
    http         OpenAI's API over any engine; no Ray
    coordinator  the scheduler's loop: requests in, plans to the ranks, tokens out; no Ray
    parallel     the configuration of engines: how many, of how many workers, where
    config       the configuration of one application, as its user wrote it
    placement    where an engine's processes go: bundles, strategy, the order of ranks; no Ray
    plan         the configuration with everything resolved, by who reads it
    start_log    what a start is waiting for, a line for each step of each process
    assembly     the parts of one engine, made from its plan
    checkpoints  the configuration checked against the checkpoints it names
    replica      one engine: its coordinator and its worker group on Ray, started, watched, restarted
    ingress      the Serve deployment around `http`, and its way to the engines
    deployments  the Serve application of both
"""
