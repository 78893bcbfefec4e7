"""HAProxy in front of the ingresses.

process   the command that Serve starts in HAProxy's place: rewrites its configuration, takes over the port
config    what HAProxy's configuration becomes: limits, errors, requests that wait
"""

from deploy.haproxy.process import main as main  # the command `aerie-haproxy`
