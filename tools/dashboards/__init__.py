"""Grafana's dashboards as code: `python -m tools.dashboards` writes k8s/dashboards, for compose and Kubernetes."""
