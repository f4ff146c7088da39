"""Documented cluster commands that the page tests do not run, and the tests of similar commands."""

from typing import Final

ELSEWHERE: Final = {
    # They read the log of a training job from Ray, which the demo's run has.
    "trainsync run logs NAME": "tests/e2e/command_line.py",
    "trainsync run logs NAME --follow --tail 20": "tests/unit/cli/run/test_logs.py",
    "trainsync run logs NAME --cluster explorers": "tests/unit/cli/run/test_logs.py",
    # On the chart's page, without the tags of the images built here.
    "helm install trainsync charts/trainsync-operator --namespace trainsync --create-namespace"
    " --set image.repository=REGISTRY/trainsync/operator,"
    "monitorImage.repository=REGISTRY/trainsync/monitor": "tests/cluster/test_chart.py",
    # verl's run wants GPUs.
    "kubectl apply -f examples/verl_grpo/fsdp.yaml": "tests/cluster/test_verl_example.py",
    "kubectl get trainingrun verl-grpo -w": "tests/cluster/test_documented_commands.py",
}
"""A page's command, without its prefix: the test that runs a similar one."""
