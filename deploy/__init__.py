"""Commands and packaged configurations (eagle.yaml and others).

cli       the command `aerie`; arguments: options of every command; command_line: spellings, unknown options;
          run_command: runs a command, reports errors in one line
serve     `aerie serve`: one server from start to end
start     `aerie start`: a Ray node; stop: `aerie stop`
status    `aerie status`; access: how commands reach a Ray, its token, `aerie env`
checks    `aerie plan`, and checks without a cluster; nodes: resources of the machines
doctor    `aerie doctor`: checks this machine
bench, chat  commands that talk to a server; client: its HTTP API
train_draft  `aerie train-draft`; evaluate: `aerie eval-draft`; tekken: `aerie tekken`
offline   the Python API: `aerie.LLM`, `aerie.AsyncLLM`
app       entry points in Serve's config files
config    configurations of commands: files, model names, options of `vllm serve`
processes  the processes of a server, and how they end after a crash
haproxy   HAProxy in front of the ingresses
models    the embedded pair
kuberay   Kubernetes through KubeRay, with Kustomize; systemd, compose: a unit, a service of Docker Compose;
          observability: alerts and dashboard
"""
