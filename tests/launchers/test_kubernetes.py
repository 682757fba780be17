"""The manifests in launchers/kubernetes/ are valid, fit together, and start commands that there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import operations_page as page
import pytest
import yaml

from dflash_mp.bench.tiny_run import tiny_tree
from dflash_mp.config import RunConfig
from dflash_mp.config_file import load_config

FILES = sorted((page.ROOT / "launchers" / "kubernetes").glob("*.yaml"))
_TITLE = "Kubernetes"


def objects() -> list[dict[str, Any]]:
    return [tree for file in FILES for tree in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, spec) of each pod that the manifests make."""
    for tree in objects():
        if tree["kind"] in ("Deployment", "Job"):
            yield tree["metadata"]["name"], tree["spec"]["template"]["spec"]
        for job in tree["spec"].get("replicatedJobs", []) if tree["kind"] == "JobSet" else []:
            yield tree["metadata"]["name"], job["template"]["spec"]["template"]["spec"]


def test_every_object_follows_the_schema_of_its_kind() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    kinds = set()
    for tree in objects():
        kinds.add(tree["kind"])
        if tree["kind"] == "JobSet":
            for job in tree["spec"]["replicatedJobs"]:
                plain = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
                kubernetes.validate(plain, "1.30", strict=True)
        else:
            kubernetes.validate(tree, "1.30", strict=True)
    assert {"Deployment", "Service", "JobSet", "Job", "PersistentVolumeClaim", "NetworkPolicy"} <= kinds


def test_the_jobset_has_only_fields_that_jobsets_have() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (jobset,) = [tree for tree in objects() if tree["kind"] == "JobSet"]
    head = {
        **jobset,
        "spec": {**jobset["spec"], "replicatedJobs": [_without_pods(j) for j in jobset["spec"]["replicatedJobs"]]},
    }
    assert models.JobsetV1alpha2JobSet.from_dict(head).to_dict() == head


def _without_pods(job: dict[str, Any]) -> dict[str, Any]:
    """A replicated job whose pods are left to the other test: the models write some of their fields otherwise."""
    template = {**job["template"]["spec"], "template": {"spec": {"containers": [{"name": "one"}]}}}
    return {**job, "template": {"spec": template}}


def test_pods_give_up_what_they_do_not_need_and_mount_what_they_have() -> None:
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, name
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = set()
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], name
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            mounted |= {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == volumes, name


def test_commands_are_configured_so_that_feeders_and_trainers_meet(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    for name, options in page.configuration(_TITLE).items():
        tree[name] = {**tree.get(name, {}), **options}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    found = dict(pods())
    feeder = _configuration(found["dflash-mp-feeder-0"], file)
    trainer = _configuration(found["dflash-mp"], file)
    services = {t["metadata"]["name"]: t["spec"]["ports"][0]["port"] for t in objects() if t["kind"] == "Service"}
    assert trainer.feed.endpoints[0] == f"tcp://feeder-0:{services['feeder-0']}"
    assert feeder.feed.endpoints == [f"tcp://0.0.0.0:{services['feeder-0']}"]
    assert feeder.stream.keys == trainer.stream.keys == Path("/keys/own")
    assert feeder.run_dir.name == trainer.run_dir.name
    ports = {port["containerPort"] for pod in found.values() for c in pod["containers"] for port in c.get("ports", [])}
    assert {feeder.metrics.feeder_port, trainer.metrics.rank_port} <= ports
    words = found["dflash-mp"]["containers"][0]["args"]
    (jobset,) = [t for t in objects() if t["kind"] == "JobSet"]
    job = jobset["spec"]["replicatedJobs"][0]
    assert (
        words[words.index("--head") + 1]
        == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    )
    assert int(words[words.index("--nodes") + 1]) == job["template"]["spec"]["parallelism"]
    assert trainer.train.drafters == found["dflash-mp"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


def test_trainers_are_reached_by_trainers_and_by_what_reads_their_figures() -> None:
    (jobset,) = [tree for tree in objects() if tree["kind"] == "JobSet"]
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    labels = template["template"]["metadata"]["labels"]
    (policy,) = [
        tree["spec"]
        for tree in objects()
        if tree["kind"] == "NetworkPolicy" and tree["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    among_them, figures = policy["ingress"]
    assert among_them == {"from": [{"podSelector": policy["podSelector"]}]}  # any port
    container = template["template"]["spec"]["containers"][0]
    ranks = template["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
    first = next(port["containerPort"] for port in container["ports"] if port["name"] == "metrics")
    assert figures == {"ports": [{"port": first, "endPort": first + ranks - 1}]}


def _configuration(pod: dict[str, Any], file: Path) -> RunConfig:
    words = pod["containers"][0]["args"]
    assert "/config/run.yaml" in words
    return load_config(file, [value for word, value in itertools.pairwise(words) if word == "--set"]).config
