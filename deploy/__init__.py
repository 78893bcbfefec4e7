"""How Aerie is run: `app` is what Serve's config files name, `cli` the command `aerie`, `*.yaml` configurations,
`models` the embedded pair."""
