"""How Aerie is run.

cli       the command `aerie`
configs   which configuration a command means, and where the paths in it start; eagle.yaml and its neighbours lie here
model_options, model_config  a configuration made of a model's name and options
checks    `aerie plan` and `aerie doctor`: what can be checked without a cluster
launch    `aerie serve`
haproxy_limits  what strangers may do to the proxy in front
app       what Serve's config files name
offline   `LLM`: an engine in your own process
evaluate  `aerie eval-draft`
models    the embedded pair
kuberay   Kubernetes
"""
