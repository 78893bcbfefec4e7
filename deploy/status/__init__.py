"""`aerie status`: a look at a running server or cluster, without Ray's dashboard. `aerie doctor --bundle`.

report   what a cluster says: nodes, applications, engines, placement groups that wait; collect: asks it; what a
         waiting placement group lacks
bundle   versions, configuration, plan, status and logs in one file; redaction: without secrets
command  `aerie status`: text, JSON and exit status
"""
