"""`aerie bench`: load on a server by a clock, whether the server keeps up or not, and what it shows.

command        the command and its options
arrivals       what comes, and when
load           sends it; stream_client: over connections that cost little
figures        what the answers say; table: in rows, plot: in lines
"""
