{{- define "trainsync-operator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "trainsync-operator.selector" -}}
app.kubernetes.io/name: trainsync-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trainsync-operator.labels" -}}
{{- $ours := include "trainsync-operator.selector" . | fromYaml -}}
{{- $_ := set $ours "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $ours "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $ours "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version) -}}
{{- toYaml (merge $ours (.Values.commonLabels | default dict)) -}}
{{- end -}}

{{- /* Takes a dict of `root` and `more`, the user's additional labels. */ -}}
{{- define "trainsync-operator.labelsAnd" -}}
{{- toYaml (merge (include "trainsync-operator.labels" .root | fromYaml) (.more | default dict)) -}}
{{- end -}}

{{- define "trainsync-operator.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "trainsync-operator.fullname" .) -}}
{{- end -}}

{{- /* Name of the role with the rights of every monitor. */ -}}
{{- define "trainsync-operator.monitorRole" -}}
{{- include "trainsync-operator.fullname" . }}-monitor
{{- end -}}

{{- /* Monitors need their role as long as their runs live: it stays when the chart is uninstalled. */ -}}
{{- define "trainsync-operator.monitorRoleMetadata" -}}
labels:
  {{- include "trainsync-operator.labelsAnd" (dict "root" . "more" (dict "app.kubernetes.io/component" "monitor")) | nindent 2 }}
annotations:
  helm.sh/resource-policy: keep
{{- end -}}

{{- /* Egress of operator and monitors: DNS and the API server. */ -}}
{{- define "trainsync-operator.egress" -}}
- ports:
  - port: 53
    protocol: UDP
  - port: 53
    protocol: TCP
- ports:
  {{- range .Values.networkPolicy.apiServerPorts }}
  - port: {{ . }}
    protocol: TCP
  {{- end }}
{{- end -}}

{{- /* Takes a dict of `image` (repository, tag, digest) and `root`. */ -}}
{{- define "trainsync-operator.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* A namespaceSelector for the Prometheus Operator with the namespaces of the served runs. */ -}}
{{- define "trainsync-operator.namespaceSelector" -}}
{{- if .Values.watchNamespaces -}}
matchNames:
{{ toYaml .Values.watchNamespaces }}
{{- else -}}
any: true
{{- end -}}
{{- end -}}

{{- /* interval and scrapeTimeout of a monitor, if set. */ -}}
{{- define "trainsync-operator.scrape" -}}
{{- $given := dict -}}
{{- range $key := list "interval" "scrapeTimeout" -}}
{{- with get $ $key }}{{ $_ := set $given $key . }}{{ end -}}
{{- end -}}
{{- with $given }}{{ toYaml . }}{{ end -}}
{{- end -}}
