{{- define "kvasir.name" -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvasir.labels" -}}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvasir.selector" -}}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvasir.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsGroup }}
fsGroup: {{ .Values.runAsGroup }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The server's container. Memory of /dev/shm counts against its limit. */}}
{{- define "kvasir.container" -}}
{{- if not (has .Values.form (list "sidecar" "daemonset")) }}{{ fail (printf "form %q is neither sidecar nor daemonset" .Values.form) }}{{ end }}
{{- if lt (int .Values.pool.gib) 1 }}{{ fail "pool.gib must be a whole number from 1" }}{{ end }}
{{- if not (or .Values.http.allowFrom .Values.http.tokenSecret) }}{{ fail "give http.allowFrom or http.tokenSecret: without both, everyone in the cluster could read which prompts are stored" }}{{ end }}
name: kvasir
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - server
  - --l1-size-gb={{ int .Values.pool.gib }}GiB
  - "--http-host=::"
  - --http-port={{ int .Values.http.port }}
  {{- if .Values.http.allowFrom }}
  - "--allow-from={{ range $i, $net := .Values.http.allowFrom }}{{ if $i }},{{ end }}http={{ $net }}{{ end }}"
  {{- end }}
  {{- if .Values.http.tokenSecret }}
  - --token-file=/etc/kvasir/tokens
  {{- end }}
  {{- if eq .Values.form "daemonset" }}
  - --ipc=/run/kvasir/lmcache.sock:5555
  {{- end }}
  {{- range .Values.pool.args }}
  - {{ . | quote }}
  {{- end }}
ports:
  - name: http
    containerPort: {{ int .Values.http.port }}
startupProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 2
  failureThreshold: 150
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 6
livenessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 20
  timeoutSeconds: 6
  failureThreshold: 6
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
resources:
  requests:
    cpu: {{ .Values.resources.cpu | quote }}
    memory: {{ add1 (int .Values.pool.gib) }}Gi
  limits:
    memory: {{ add1 (int .Values.pool.gib) }}Gi
volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  {{- if eq .Values.form "daemonset" }}
  - {name: sockets, mountPath: /run/kvasir}
  {{- end }}
  {{- if .Values.http.tokenSecret }}
  - {name: tokens, mountPath: /etc/kvasir, readOnly: true}
  {{- end }}
{{- end -}}

{{- define "kvasir.tokenVolume" -}}
{{- if .Values.http.tokenSecret }}
- name: tokens
  secret:
    secretName: {{ .Values.http.tokenSecret }}
    defaultMode: 0440
{{- end }}
{{- end -}}
