"""How Aerie is run. The packaged configurations (eagle.yaml and others) lie here.

cli       the command `aerie`; arguments: of every command; run_command: runs it and tells what went wrong in one line
serve     `aerie serve`: one server from start to end
start     `aerie start`: a Ray node; stop: `aerie stop`
plan      `aerie plan`; checks: what can be checked without a cluster; nodes: what the machines have
doctor    `aerie doctor`: what this machine lacks
bench, chat  commands that talk to a server; client: its HTTP API, server_options: its address and key
evaluate  `aerie eval-draft`
offline   `LLM`: an engine in your own process; offline_requests: its parameters and outputs
app       what Serve's config files name
config    which configuration a command uses: files, model names, options of `vllm serve`
processes  the processes of a server, and how they end after a crash
haproxy   HAProxy in front of the ingresses
models    the embedded pair
kuberay   Kubernetes; observability: alerts and dashboard
"""
