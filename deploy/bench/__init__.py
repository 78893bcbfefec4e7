"""`aerie bench`: sends requests at fixed rates, whether or not the server keeps up, and reports latencies.

command        the command and its options
arrivals       the requests and their times
load           sends requests; stream_client: cheap streaming connections
figures        latencies and rates of the answers; table: as rows, plot: as lines
"""
