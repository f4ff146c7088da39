{{- define "trainsync-operator.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
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
{{ include "trainsync-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "trainsync-operator.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "trainsync-operator.fullname" .) -}}
{{- end -}}

{{- /* Takes a dict of `image` (repository, tag) and `root`. */ -}}
{{- define "trainsync-operator.image" -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
