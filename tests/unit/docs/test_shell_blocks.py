import pytest

from tests.unit.docs.commands import commands, split, wants_a_cluster
from tests.unit.docs.elsewhere import ELSEWHERE
from tests.unit.docs.pages import ROOT, all_blocks, pages, prose
from tests.unit.docs.programs import complaint, has_value, inline


def test_every_command_in_a_shell_block_is_one_that_exists():
    shown = [command for block in all_blocks("bash", "console") for command in commands(block)]
    assert len(shown) > 40
    wrong = [f"{command}: {said}" for command in shown if (said := complaint(command))]
    assert not wrong, "\n".join(wrong)


def test_every_command_of_ours_in_the_running_text_is_one_that_exists():
    # The roadmap names what is to come.
    read = [page for page in pages() if page.name != "roadmap.md"]
    shown = [command for page in read for command in inline(prose(page), f"{page.name}:0")]
    assert len(shown) > 20
    assert any(command.program == "pip" for command in shown)
    wrong = [f"{command}: {said}" for command in shown if (said := complaint(command))]
    assert not wrong, "\n".join(wrong)


def test_every_command_for_a_cluster_is_run_by_a_test():
    # `cluster` blocks: tests/cluster/documented/test_documented_commands.py runs them.
    shown: dict[str, set[bool]] = {}
    for block in all_blocks("bash", "console"):
        for command in filter(wants_a_cluster, commands(block)):
            text = str(command).partition(": ")[2]
            shown.setdefault(text, set()).add(block.directive == "cluster")
    assert len(shown) > 20
    assert not [text for text, marked in shown.items() if True not in marked | {text in ELSEWHERE}]
    assert not [text for text in ELSEWHERE if text not in shown]
    assert not [test for test in ELSEWHERE.values() if not (ROOT / test).exists()]


@pytest.mark.parametrize(
    "line",
    [
        "make no-such-target",
        "make faults NO_SUCH=1",
        "trainsync checkpoints explode DIR",
        "trainsync checkpoints ls DIR --kepp 3",
        "trainsync --verison",
        "kubectl exec deploy/x -- trainsync checkpoints lst /x",
        "kubectl obtain pods",
        "kubectl apply -f examples/no_such/run.yaml",
        "python3 -m devcluster upp",
        "python -m tests.faults --seeed 3",
        "python -m no_such_module",
        "python no_such.py",
        "torchrun --nproc-per-node 2 no_such.py",
        "helm install trainsync charts/no-such-chart",
        "helm install trainsync charts/trainsync-operator --set image.repositry=x",
        "docker build -f images/none.Containerfile .",
        "pip install '.[no_such_extra]'",
        "pip install 'trainsync[worker]'",
        "export KUBECONFIG=$(python3 -m devcluster kubeconfg)",
        "make lint && trainsync checkpoints lst x",
        "some-unknown-program --x",
    ],
)
def test_a_wrong_command_is_noticed(line):
    assert any(complaint(command) for command in split(line, "docs/tutorial.md:1"))


def test_a_command_is_taken_apart():
    words = split("A=1 make -k lint  # why\n", "here") + split("cat x | grep 'a b' > y", "here")
    assert [(c.program, c.arguments, c.variables) for c in words] == [
        ("make", ("-k", "lint"), ("A",)),
        ("cat", ("x",), ()),
        ("grep", ("a b",), ()),
    ]


def test_values_of_the_chart_are_found_by_their_path():
    assert has_value("image.repository")
    assert has_value("watchNamespaces")
    assert has_value("podLabels.anything")
    assert has_value(r"podLabels.example\.com/team")
    assert not has_value("podLabels.a/b/c")
    assert not has_value("image.repositry")
    assert not has_value("nothing")
