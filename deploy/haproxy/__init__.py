"""HAProxy in front of the ingresses.

process   the command that Serve starts instead of HAProxy: rewrites the configuration, takes over the port
config    the rewritten configuration: limits, errors, waiting requests
"""

from aerie.deploy.haproxy.process import main as main  # the command `aerie-haproxy`
