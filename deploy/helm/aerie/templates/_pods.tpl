{{/* Containers and pods of the head and of the workers. Each template takes {root, group, name, ports, gpus}. */}}

{{- define "aerie.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "aerie.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Settings of `aerie start`. */}}
{{- define "aerie.env" -}}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /home/ray/aerie-haproxy}
- {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
- {name: RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED, value: "0"}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "2"}
- {name: RAY_SERVE_HAPROXY_METRICS_ENABLED, value: "0"}
- {name: RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S, value: "2"}
- {name: RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER, value: 1s}
- {name: RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S, value: "3700"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: "3700"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: "3"}
- {name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S, value: "55"}
- {name: RAY_kill_worker_timeout_milliseconds, value: "1000"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_health_check_initial_delay_ms, value: "5000"}
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "1000"}
- {name: RAY_health_check_failure_threshold, value: "3"}
- {name: RAY_raylet_start_wait_time_s, value: "120"}
- {name: RAY_gcs_server_port_wait_time_s, value: "120"}
- {name: RAY_agent_register_timeout_ms, value: "120000"}
- {name: RAY_START_HOOK, value: aerie.deploy.serve.ray_start.hook}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end }}

{{- define "aerie.pod" -}}
{{- $values := .root.Values -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 100
  fsGroup: 100
  seccompProfile: {type: RuntimeDefault}
{{- with $values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
- name: {{ .name }}
  image: {{ include "aerie.image" .root }}
  {{- with $values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities: {drop: [ALL]}
  ports:
  {{- range .ports }}
  - {name: {{ .name }}, containerPort: {{ .port }}}
  {{- end }}
  env:
  {{- include "aerie.env" .root | nindent 2 }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- $resources := deepCopy .group.resources }}
  {{- if .gpus }}
  {{- $_ := set $resources "nvidia.com/gpu" (.gpus | toString) }}
  {{- end }}
  resources:
    requests: {{- toYaml $resources | nindent 6 }}
    limits: {{- toYaml $resources | nindent 6 }}
  {{- with .group.probes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  volumeMounts:
  - {name: models, mountPath: {{ $values.models.mountPath }}, readOnly: true}
  - {name: shm, mountPath: /dev/shm}
  {{- if $values.keys.secret }}
  - {name: keys, mountPath: /run/secrets/aerie, readOnly: true}
  {{- end }}
volumes:
- name: models
  persistentVolumeClaim: {claimName: {{ $values.models.claim }}, readOnly: true}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
{{- if $values.keys.secret }}
- name: keys
  secret: {secretName: {{ $values.keys.secret }}}
{{- end }}
{{- with .group.pod }}
{{ toYaml . }}
{{- end }}
{{- end }}
