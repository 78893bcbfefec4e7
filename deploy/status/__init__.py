"""`aerie status`: a look at a running server or cluster, without Ray's dashboard.

report   what a cluster says: nodes, applications, engines, placement groups that wait; collect: asks it
missing  what a waiting placement group lacks
command  `aerie status`: text, JSON and exit status
"""
