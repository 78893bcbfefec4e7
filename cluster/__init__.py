"""From HTTP to ranks, on Ray. The only folder, with `deploy`, that imports Ray.

Lowest layer first; each module imports only earlier ones (tests/cluster/test_rooms.py):

    linux        Linux settings of a process
    environment  the environment variables of a process
    transport    messages between the processes, and their sockets
    http         OpenAI's API over any engine; no Ray
    learning     a draft that learns from its engine's texts; no Ray
    coordinator  the scheduler's loop: requests in, plans to the ranks, tokens out; no Ray
    parallel     the configuration of engines: how many, of how many workers, where
    config       the configuration of one application, as the user wrote it
    placement    placement of an engine's processes: bundles, strategy, order of ranks; no Ray
    plan         the resolved configuration, a part per reader
    start_log    progress of a start, a line per step of each process; log lines as JSON
    assembly     builds the parts of one engine from its plan
    replica      one engine: its coordinator and its worker group on Ray, started, watched, restarted
    ingress      the Serve deployment around `http`, and its connections to engines
"""
