"""How Aerie is run.

cli       the command `aerie`
configs   which configuration a command means, and where the paths in it start; eagle.yaml and its neighbours lie here
model_options, model_config  a configuration made of a model's name and options; hub: models by name
checks    `aerie plan`: what can be checked without a cluster
check_process  the process that runs them for `aerie serve`, and then begins the ranks
doctor    `aerie doctor`: what is needed next on this machine
guard     the process that signals go to in place of the server; private_arguments: keys on its command line
launch    `aerie serve`; ray_start, ray_files: its Ray; watches, process_watch, start_watch: what it watches
console   what `aerie serve` prints; announcement: its last line; address: where it listens
nodes     `aerie start`; stop: `aerie stop`; server_record: what both and `aerie serve` have begun
haproxy   the proxy in front as a server runs it; haproxy_config: what strangers may do to it, and who waits
app       what Serve's config files name
offline   `LLM`: an engine in your own process
evaluate  `aerie eval-draft`
chat, bench  the commands that talk to a server: client: its HTTP API, server_options: which one
models    the embedded pair
kuberay   Kubernetes
"""
