{{/* What follows from `config`: the Serve configuration, numbers of pods and GPUs. */}}

{{/* The arguments of the application: `config`, and `keys` as files of the secret. */}}
{{- define "aerie.args" -}}
{{- $args := deepCopy .Values.config -}}
{{- if and .Values.keys.entries (not .Values.keys.secret) -}}
{{- fail "keys.entries: want keys.secret, the Secret whose files hold the keys" -}}
{{- end -}}
{{- if and .Values.keys.secret (not .Values.keys.entries) -}}
{{- fail "keys.secret: wants keys.entries, such as [{name: search}] for the Secret's file `search`" -}}
{{- end -}}
{{- with .Values.keys.entries -}}
{{- $keys := list -}}
{{- range . -}}
{{- $keys = append $keys (merge (dict "file" (printf "/run/secrets/aerie/%s" .name)) .) -}}
{{- end -}}
{{- $_ := set $args "ingress" (merge (dict "api_keys" $keys) ($args.ingress | default dict)) -}}
{{- end -}}
{{- range $section, $settings := $args -}}
{{- if kindIs "invalid" $settings -}}{{- $_ := unset $args $section -}}{{- end -}}
{{- end -}}
{{ toYaml $args }}
{{- end }}

{{- define "aerie.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
logging_config:
  enable_access_log: false
applications:
- name: aerie
  route_prefix: {{ .Values.routePrefix }}
  import_path: aerie.deploy.app:build
  args: {{- include "aerie.args" . | nindent 4 }}
{{- end }}

{{/* The number of worker pods: {min, max}. */}}
{{- define "aerie.replicas" -}}
{{- $replicas := (.Values.config.parallel | default dict).replicas | default 1 -}}
{{- if kindIs "map" $replicas -}}
{{- if not .Values.autoscaling.enabled -}}
{{- fail "config.parallel.replicas: a range wants autoscaling.enabled=true" -}}
{{- end -}}
{{ toYaml $replicas }}
{{- else if .Values.autoscaling.enabled -}}
{{- fail "autoscaling.enabled: wants config.parallel.replicas as a range, such as {min: 1, max: 4}" -}}
{{- else -}}
min: {{ $replicas }}
max: {{ $replicas }}
{{- end -}}
{{- end }}
