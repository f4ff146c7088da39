"""Documented cluster commands that the page tests do not run, and the tests of similar commands."""

from typing import Final

ELSEWHERE: Final = {
    # It reads the log of a training job from Ray, which the demo's run has.
    "kubectl get --raw '/api/v1/namespaces/NAMESPACE/services/RAYCLUSTER-head-svc:8265/proxy"
    "/api/v0/logs/file?submission_id=RAYJOB&node_id=any&lines=200'": "tests/e2e/command_line.py",
    # On the chart's own page, without the tags of what was built here.
    "helm install trainsync charts/trainsync-operator --namespace trainsync --create-namespace"
    " --set image.repository=REGISTRY/trainsync/operator,"
    "monitorImage.repository=REGISTRY/trainsync/monitor": "tests/cluster/chart/test_chart.py",
    # It begins another attempt, which the pages' run is not fit for.
    "trainsync run rollback NAME --step N": "tests/e2e/test_faults.py",
    # vLLM's environment is a large one.
    "trainsync run prove NAME": "tests/vllm_cluster/test_trainingrun.py",
    "kubectl apply -f examples/vllm_grpo/trainingrun.yaml": (
        "tests/vllm_cluster/test_trainingrun.py"
    ),
    "kubectl get tr vllm-grpo -o wide": "tests/vllm_cluster/test_trainingrun.py",
    "kubectl patch tr vllm-grpo --type=json -p"
    """ '[{"op": "replace", "path": "/spec/servers/0/replicas", "value": 1}]'""": (
        "tests/vllm_cluster/test_trainingrun.py"
    ),
    # verl's run wants GPUs.
    "kubectl apply -f examples/verl_grpo/fsdp.yaml": (
        "tests/cluster/documented/test_verl_example.py"
    ),
    "kubectl get trainingrun verl-grpo -w": (
        "tests/cluster/documented/test_documented_commands.py"
    ),
}
"""A page's command, without its prefix: the test that runs a similar one."""
